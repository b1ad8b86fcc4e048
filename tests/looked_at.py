"Models whose samples meet, and the step and loop that refuse them."
import copy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dp_companion import PrivacyEngine
from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.private_step import PrivateStep


WAYS = pytest.mark.parametrize("way", ["step", "loop"])


N = 16


class Net(nn.Module):
    "Two linear layers and a function of them."
    def __init__(self, function, frozen=False):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 5, bias=False).requires_grad_(
            not frozen), nn.Linear(5, 3), function
    def forward(self, x): return self.function(self, x)


class Scaled(nn.Module):
    "A parameter of the model itself around a function."
    def __init__(self, function):
        super().__init__()
        self.scale, self.last, self.function = nn.Parameter(torch.ones(5)), nn.Linear(5,
            3), function
    def forward(self, x): return self.last(self.scale*self.function(x))


def data(n=N):
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0),
                       dtype=torch.float64), torch.arange(n) % 3


def one_step(model, way, x, y):
    "The summed gradient of one step on all records, with next to no noise."
    torch.manual_seed(0)
    model, loss, options = model.double(), nn.CrossEntropyLoss(), dict(noise_multiplier=1e-12,
        expected_batch_size=len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=.1)
    if way == "step":
        PrivateStep(model, optimizer, clip_rule=Flat(max_grad_norm=1.), **options)(loss, x, y)
    else:
        found = PrivacyEngine(secure_mode=False).make_private(module=model, optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), max_grad_norm=1.,
            **options)
        for inputs, targets in found[-1]:
            loss(found[0](inputs), targets).backward()
            found[1].step()
    return len(x)*torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def clipped_sum(model, x, y):
    "The same by ordinary differentiation, one record after the other."
    model, parts = copy.deepcopy(model).double(), []
    for a, b in zip(x.clone(), y):
        g = torch.cat([p.flatten() for p in torch.autograd.grad(F.cross_entropy(model(a[None]),
            b[None]), list(model.parameters()), materialize_grads=True)])
        parts.append(g/max(1, g.norm()))
    return sum(parts)


class Conditioned(nn.Module):
    "A layer with a parameter of its own, and a second input as an attribute."
    def __init__(self):
        super().__init__()
        self.gain, self.last, self.condition = nn.Parameter(torch.ones(5)), nn.Linear(5, 3), None
    def forward(self, x): return x*self.gain*self.condition


class ConditionedNet(nn.Module):
    def __init__(self): super().__init__(); self.block, self.last = Conditioned(), nn.Linear(5, 3)
    def forward(self, x):
        self.block.condition = 1 + x.flip(1).abs()
        return self.last(self.block(x))


BEYOND = { # Found too large, or in another direction, which norms alone do not show
    "a half of a weight": lambda m, x: m.last(torch.func.functional_call(m.first,
        {"weight": .5*m.first.weight.detach()}, x)),
    "frozen on its way": lambda m, x: frozen_on_its_way(m, x),
}


def frozen_on_its_way(m, x):
    m.first.requires_grad_(False)
    h = m.first(x)
    m.first.requires_grad_(True)
    return m.last(h)


def moved(build, x, y, k, *, steps=1, change=lambda model, t: None, C=.01, **options):
    "How far one record moves the sum of a step, the most of some, in bounds."
    def sums(rows):
        torch.manual_seed(0)
        model = build().double()
        step = PrivateStep(model,
                           torch.optim.SGD([p for p in model.parameters() if p.requires_grad],
                               lr=0.), clip_rule=Flat(max_grad_norm=C), expected_batch_size=1,
                               noise_multiplier=0., **options)
        for t in range(steps):
            change(model, t)
            step(nn.CrossEntropyLoss(), x[rows], y[rows])
            yield torch.cat([p.grad.flatten() for p in step.recorder.slots])
    everyone = torch.arange(len(x))
    return max((g - h).norm().item()/C for g, h in zip(sums(everyone),
        sums(everyone[everyone != k])))
