"Two passes in one step: a critic on real and generated records."
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine

N, C = 8, .3


class Both(nn.Module):
    "What the sentence recommends: one module that takes the inputs of both passes."
    def __init__(self, critic):
        super().__init__()
        self.critic = critic
    def forward(self, real, generated): return self.critic(real), self.critic(generated)


def critic():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def drawn(n=N): return torch.randn(n, 4, generator=torch.Generator().manual_seed(1)).double()


def private(model):
    data = TensorDataset(torch.linspace(-1, 1, 4*N).reshape(N, 4).double())
    sgd = torch.optim.SGD(model.parameters(), lr=0.)
    return PrivacyEngine().make_private(module=model, optimizer=sgd, max_grad_norm=C,
        data_loader=DataLoader(data, batch_size=N), noise_multiplier=1e-9,
        noise_generator=torch.Generator())


def hinge(real, generated): return F.relu(1 - real) + F.relu(1 + generated)
def difference(real, generated): return generated - real
def logistic(real, generated): return F.softplus(-real) + F.softplus(generated)


@pytest.mark.parametrize("loss", [hinge, difference, logistic])
@pytest.mark.parametrize("way", ["mean", "one loss per sample"])
def test_one_record_s_gradient_is_the_sum_over_both_passes(loss, way):
    plain, model, expected = critic(), Both(critic()), 0
    module, optimizer, loader = private(model)
    for x, in loader:
        z = drawn(len(x))
        for row, other in zip(x.split(1), z.split(1)):
            found = torch.autograd.grad(loss(plain(row), plain(other)).sum(),
                                        list(plain.parameters()), allow_unused=True)
            pairs = zip(found, plain.parameters())
            g = torch.cat([(0*p if part is None else part).flatten() for part, p in pairs])
            expected = expected + g*min(1., C/float(g.norm().clamp(min=1e-30)))
        losses = loss(*module(x, z)).squeeze(1)
        optimizer.backward(losses) if way != "mean" else losses.mean().backward()
        optimizer.step()
    released = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(N*released, expected, rtol=1e-6, atol=1e-7)


def second_before_backward(module, x): return module(x).mean() - module(drawn(len(x))).mean()


def second_after_backward(module, x):
    module(x).mean().backward()
    return module(drawn(len(x))).mean()


def ascent(module, x):
    "A step of sharpness-aware minimisation."
    module(x).mean().backward()
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None: p.add_(.05*p.grad)
    return module(x).mean()


@pytest.mark.parametrize("loss", [second_before_backward, second_after_backward, ascent])
def test_two_recorded_passes_are_refused_with_the_way_that_works(loss):
    module, optimizer, loader = private(critic())
    for x, in loader:
        with pytest.raises(ValueError, match="to one module, which may run its layers twice"):
            loss(module, x).backward()
            optimizer.step()
