"Forward passes in bfloat16, with parameters in single precision."
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine
from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.private_step import PrivateStep

C, LOSS = .5, nn.CrossEntropyLoss()


class Words(nn.Module):
    "Embeddings and a transformer layer."
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0., batch_first=True)
    def forward(self, x): return self.last(self.layer(self.words(x)).mean(1))


class Scaled(nn.Module):
    "A parameter of its own beside layers, and a layer that is used twice."
    def __init__(self):
        super().__init__()
        self.scale, self.first, self.last = nn.Parameter(torch.ones(6)), nn.Linear(6, 6), nn.Linear(
            6, 3)
    def forward(self, x): return self.last(self.first(self.first(x*self.scale).tanh()))


def linear(): return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def images():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3),
                         nn.Flatten(), nn.Linear(128, 3))


def draw(seed): return torch.Generator().manual_seed(seed)


MODELS = {
    "linear": (linear, lambda n, g: torch.randn(n, 6, generator=g)),
    "images": (images, lambda n, g: torch.randn(n, 1, 8, 8, generator=g)),
    "block": (Scaled, lambda n, g: torch.randn(n, 6, generator=g)),
    "words": (Words, lambda n, g: torch.randint(9, (n, 5), generator=g)),
}


def sums(name, batches, seed):
    "The clipped sum of each batch, and its norms."
    torch.manual_seed(seed)
    model, found = MODELS[name][0](), []
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.), noise_multiplier=0.,
                       clip_rule=Flat(max_grad_norm=C), expected_batch_size=1)
    for x, y in batches:
        with torch.autocast("cpu", torch.bfloat16): report = step(LOSS, x, y)
        g = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        found.append((g, report.nonprivate_norms))
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**16),
       n=st.sampled_from([2, 3, 9, 33, 64]), exponent=st.floats(-6, 5))
def test_one_record_moves_the_sum_by_at_most_the_bound(name, seed, n, exponent):
    "Whatever bfloat16 makes of it, however large or small it is, beside few or many."
    x, y = MODELS[name][1](n, draw(seed)), torch.randint(3, (n,), generator=draw(seed))
    if x.dtype != torch.long: x[0] *= 10**exponent
    (both, norms), (without, _) = sums(name, [(x, y), (x[1:], y[1:])], seed)
    assert (both - without).norm() <= min(C, norms[0].item())*(1 + 1e-5) + n*1e-7


def test_records_that_round_together():
    "Alike records, whose sum is long: in bfloat16 it would move by more than the bound."
    x, y = MODELS["linear"][1](1, draw(0)).expand(257, 6).clone(), torch.zeros(257).long()
    (both, _), (without, _) = sums("linear", [(x, y), (x[1:], y[1:])], 0)
    assert both.norm() > 200*C and (both - without).norm() <= C*(1 + 1e-4)
    assert (both.bfloat16() - without.bfloat16()).double().norm() > 1.05*C


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_near_those_of_single_precision(name):
    x, y = MODELS[name][1](8, draw(0)), torch.arange(8) % 3
    (_, rounded), = sums(name, [(x, y)], 0)
    torch.manual_seed(0)
    model = MODELS[name][0]()
    for k, (row, label) in enumerate(zip(x.split(1), y.split(1))):
        g = torch.autograd.grad(LOSS(model(row), label), list(model.parameters()))
        norm = torch.cat([v.flatten() for v in g]).norm().item()
        assert rounded[k].item() == pytest.approx(norm, rel=.05)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inside", ["module", "loss", "loop"])
def test_a_loop_under_autocast_trains(name, inside):
    "With the module in the context, the loss too, or all of the loop."
    torch.manual_seed(0)
    model = MODELS[name][0]()
    data = TensorDataset(MODELS[name][1](40, draw(0)), torch.arange(40) % 3)
    module, optimizer, loader = PrivacyEngine().make_private(module=model, noise_multiplier=1.,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), max_grad_norm=1.,
        data_loader=DataLoader(data, batch_size=8))
    with torch.autocast("cpu", torch.bfloat16, enabled=inside == "loop"):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = module(x)
                if inside != "module": loss = LOSS(outputs, y)
            if inside == "module": loss = LOSS(outputs.float(), y)
            loss.backward()
            optimizer.step()
    assert optimizer.steps_taken == 5
    assert all(p.isfinite().all() and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_gives_the_sum_of_a_step(name):
    "Norms of the user's loop and of a step are the same, wherever autocast ends."
    x, y = MODELS[name][1](8, draw(0)), torch.arange(8) % 3
    (total, norms), = sums(name, [(x, y)], 0)
    torch.manual_seed(0)
    model = MODELS[name][0]()
    module, optimizer, loader = PrivacyEngine().make_private(module=model, noise_multiplier=1e-9,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.), max_grad_norm=C,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8))
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16): loss = LOSS(module(x), y)
        loss.backward()
        optimizer.step()
    assert torch.allclose(optimizer.report.nonprivate_norms, norms, rtol=1e-2)
    step = torch.cat([slot.shaped.flatten() for slot in optimizer.recorder.slots.values()])
    assert (step.double()*8 - total).norm() <= .01*total.norm()
