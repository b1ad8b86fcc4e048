"""Time of a step in a user's own loop over an ordinary step: `python tests/bench/users_loop.py`.

The network and the calls of Opacus's MNIST tutorial. One process, one thread, the three loops in
turn, medians after a warm-up.
"""
import argparse
import json
import statistics
import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class SampleConvNet(nn.Module):
    "The network of Opacus's MNIST tutorial."
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        self.fc1, self.fc2 = nn.Linear(32*4*4, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1).view(-1, 32*4*4)
        return self.fc2(F.relu(self.fc1(x)))


def parts(batch, records):
    "Module, optimizer and loader, before any engine."
    torch.manual_seed(0)
    model = SampleConvNet()
    data = TensorDataset(torch.randn(records, 1, 28, 28), torch.randint(10, (records,)))
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    return dict(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.05),
        data_loader=loader)


def ordinary(batch, records): return tuple(parts(batch, records).values())


def private(engine):
    "The loop's objects as an engine returns them."
    def made(batch, records):
        given = parts(batch, records)
        return engine.make_private(**given, noise_multiplier=1., max_grad_norm=1.)
    return made


def endless(loader):
    while True: yield from loader


def steps(model, optimizer, loader):
    "One step of the loop at each call; its seconds, the batch being drawn and collated included."
    batches, criterion = endless(loader), nn.CrossEntropyLoss()
    def step():
        start = time.perf_counter()
        data, target = next(batches)
        optimizer.zero_grad()
        criterion(model(data), target).backward()
        optimizer.step()
        return time.perf_counter() - start
    return step


def main(args):
    import opacus
    from dp_companion import PrivacyEngine
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    engines = {"ours": PrivacyEngine(), "Opacus": opacus.PrivacyEngine()}
    makers = {"ordinary": ordinary} | {name: private(engine) for name, engine in engines.items()}
    loops = {name: steps(*make(args.batch, 64*args.batch)) for name, make in makers.items()}
    times = {name: [] for name in loops}
    for k in range(args.warm + args.steps):
        for name, step in loops.items():
            seconds = step()
            if k >= args.warm: times[name].append(seconds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = {name: round(m/medians["ordinary"], 3) for name, m in medians.items()}
    print(json.dumps({"batch": args.batch, "milliseconds": {n: round(1000*m, 3) for n,
        m in medians.items()}, "ratios": ratios}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in dict(steps=200, warm=40, batch=64).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    main(parser.parse_args())
