"""One of the processes that torchrun starts: a user's loop under DistributedDataParallel.

`torchrun --nproc-per-node 4 tests/torchrun_job.py OUT STEPS [--die RANK] [--accelerate WHEN]` takes
up each process's checkpoint in OUT where there is one, trains up to STEPS, saves after SAVED steps,
and writes each process's weights and batch sizes. With accelerate, its backward pass is
accelerate's, and WHEN says when it prepares model and optimizer: `before` make_private, which wraps
the model, `after` the loop has wrapped it and made it private, or `never`.
"""
import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dp_companion import PrivacyEngine
from user_loops import data, network, weights

SAVED = 3


def started(accelerate):
    "The processes' group; with accelerate, what begins it."
    if accelerate is None: return dist.init_process_group("gloo")
    from accelerate import Accelerator
    return Accelerator(cpu=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--die", type=int, help="the process that is killed before its last step")
    parser.add_argument("--accelerate", choices=["before", "after", "never"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = started(args.accelerate)
    rank, model, privacy = dist.get_rank(), network(), PrivacyEngine()
    if args.accelerate != "before": model = DistributedDataParallel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    if args.accelerate == "before": model, sgd = accelerator.prepare(model, sgd)
    module, optimizer, loader = privacy.make_private(module=model, noise_multiplier=1.,
        optimizer=sgd, max_grad_norm=1., data_loader=DataLoader(data(), batch_size=8),
        expected_batch_size=8, noise_generator=torch.Generator().manual_seed(5))
    if args.accelerate == "after": module, optimizer = accelerator.prepare(module, optimizer)
    checkpoint, sizes, own = args.out/f"checkpoint{rank}.pt", [], dict(module=module,
        optimizer=optimizer)
    if checkpoint.exists(): privacy.load_checkpoint(path=checkpoint, **own)
    while len(privacy.accountant) < args.steps:
        for x, y in loader:
            if rank == args.die and len(privacy.accountant) == args.steps - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(module(x), y)
            loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            sizes.append(len(x))
            if len(privacy.accountant) == SAVED: privacy.save_checkpoint(path=checkpoint, **own)
            if len(privacy.accountant) == args.steps: break
    torch.save((weights(model), sizes, len(privacy.accountant)), args.out/f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__": main()
