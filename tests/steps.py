"A private step on a small network, for the tests of several modules."
import torch
from torch import nn

from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.private_step import PrivateStep

LOSS = nn.CrossEntropyLoss()


def seeded(seed=0): return torch.Generator().manual_seed(seed)


def network(build, dtype=torch.float32):
    torch.manual_seed(0)
    return build().to(dtype)


def step_for(model, **options):
    options = dict(clip_rule=Flat(max_grad_norm=.5), expected_batch_size=8,
                   noise_multiplier=0.) | options
    return PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1), **options)


def gradient(step): return torch.cat([p.grad.flatten() for p in step.recorder.slots])


def difference(a, b): return ((a-b).norm()/b.norm()).item()
