"""What the sanitization layer adds to a training step: `python tests/bench/sanitization_layer.py [--json results/bench/sanitization_layer.json]`.

The median ratio of two steps of one network, with and without the layer, one after the other in one process on one thread, in processor time; which of the two comes first changes from pair to pair.
"""
import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from dp_companion.algorithms.private_step import keep_freed_memory
from dp_companion.algorithms.sanitization import SanitizationLayer, sanitization_cnn, sanitization_resnet18
from dp_companion.files import write_whole

GOAL = 1.05
ROWS = {  # name: network around a layer, its width, shape of a batch, pairs of steps
    "CNN, MNIST, batch 64": (lambda layer: sanitization_cnn(50, sanitization=layer), 50, (64, 1, 28, 28), 30),
    "CNN, CIFAR-10, batch 64": (lambda layer: sanitization_cnn(50, sanitization=layer, image_size=32, channels=3), 50, (64, 3, 32, 32), 30),
    "ResNet-18, CIFAR-10, batch 250": (lambda layer: sanitization_resnet18(sanitization=layer), 512, (250, 3, 32, 32), 10),
}


def seconds(model, optimizer, images, labels):
    start = time.process_time()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    return time.process_time() - start


def ratio(network, width, shape, pairs, warm_up=2):
    "Median of the pairs' ratios, and the median step without the layer in milliseconds."
    torch.manual_seed(0)
    models = [network(layer) for layer in (SanitizationLayer(width, .5, 1., .2), nn.Identity())]
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in models]
    images, labels, times = torch.randn(shape), torch.randint(10, shape[:1]), []
    for k in range(pairs + warm_up):
        pair = {i: seconds(models[i], optimizers[i], images, labels) for i in ((0, 1) if k % 2 else (1, 0))}
        times.append((pair[0], pair[1]))
    return statistics.median(a/b for a, b in times[warm_up:]), 1e3*statistics.median(b for _, b in times[warm_up:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = []
    for name, row in ROWS.items():
        found, plain = ratio(*row)
        rows.append({"row": name, "ratio": round(found, 3), "plain_ms": round(plain, 1), "goal": GOAL, "pairs": row[3]})
        print(f"{name}: {found:.3f} of a step without the layer ({plain:.1f} ms; goal {GOAL})", flush=True)
    if arguments.json: write_whole(arguments.json, (json.dumps({"machine": platform.machine(), "torch": torch.__version__, "threads": 1, "rows": rows}, indent=1) + "\n").encode())


if __name__ == "__main__": main()
