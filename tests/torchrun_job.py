"""One of the processes that torchrun starts: a user's loop under DistributedDataParallel.

`torchrun --nproc-per-node 4 tests/torchrun_job.py OUT STEPS [--die RANK]` takes up each process's
checkpoint in OUT where there is one, trains up to STEPS, saves after SAVED steps, and writes each
process's weights and batch sizes.
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--die", type=int, help="the process that is killed before its last step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, model, privacy = dist.get_rank(), DistributedDataParallel(network()), PrivacyEngine()
    module, optimizer, loader = privacy.make_private(module=model, noise_multiplier=1.,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1, momentum=.9), max_grad_norm=1.,
        data_loader=DataLoader(data(), batch_size=8), expected_batch_size=8,
        noise_generator=torch.Generator().manual_seed(5))
    checkpoint, sizes, own = args.out/f"checkpoint{rank}.pt", [], dict(module=module,
        optimizer=optimizer)
    if checkpoint.exists(): privacy.load_checkpoint(path=checkpoint, **own)
    while len(privacy.accountant) < args.steps:
        for x, y in loader:
            if rank == args.die and len(privacy.accountant) == args.steps - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(module(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
            if len(privacy.accountant) == SAVED: privacy.save_checkpoint(path=checkpoint, **own)
            if len(privacy.accountant) == args.steps: break
    torch.save((weights(model), sizes, len(privacy.accountant)), args.out/f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__": main()
