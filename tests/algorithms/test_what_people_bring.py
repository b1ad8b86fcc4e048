"Objects around a loop: accelerate, sparse inputs, memory managers, checkpoints, optimizer state."
import io
import warnings

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine

LOSS = nn.CrossEntropyLoss()


def data(n=40): return TensorDataset(torch.randn(n, 6), torch.arange(n) % 3)


def private(model=None, optimizer=None, batch_size=8, n=40):
    model, engine = model or nn.Linear(6, 3), PrivacyEngine()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=.1)
    return engine, *engine.make_private(module=model, optimizer=optimizer, noise_multiplier=1.,
        max_grad_norm=1., data_loader=DataLoader(data(n), batch_size=batch_size))


def train(module, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        LOSS(module(x), y).backward()
        optimizer.step()


def test_what_accelerate_has_wrapped_is_taken():
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(6, 3)
    model, optimizer = accelerate.Accelerator(cpu=True).prepare(model,
        torch.optim.SGD(model.parameters(), lr=.1))
    engine, *loop = private(model, optimizer)
    train(*loop)
    assert len(engine.accountant) == 5


class Sparse(nn.Module):
    def __init__(self, is_dense):
        super().__init__()
        self.layer, self.is_dense = nn.Linear(6, 3), is_dense
    def forward(self, x):
        x = x.to_sparse()
        return self.layer(x.to_dense() if self.is_dense else x)


def test_a_sparse_input_is_refused_and_the_advice_works():
    with pytest.raises(ValueError, match=r"must be given a dense input, got torch.sparse_coo; "
                       r"call to_dense\(\) before it"):
        train(*private(Sparse(False))[1:])
    train(*private(Sparse(True))[1:])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_memory_manager_announces_the_pieces_that_come(size):
    _, module, optimizer, loader = private(batch_size=16, n=320)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size,
                            optimizer=optimizer) as pieces:
        announced, came = len(pieces), 0
        for x, y in pieces:
            LOSS(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            came += 1
    assert announced == 320//size
    assert abs(came - announced) <= 20 + .25*announced # 20 logical batches, each rounded up


class Schedule:
    "A scheduler with a state, as Opacus's."
    def __init__(self, value): self.value = value
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]


@pytest.mark.parametrize("where", ["file object", "path"])
def test_a_checkpoint_takes_opacus_s_arguments_and_file_objects(where, tmp_path):
    target = io.BytesIO() if where == "file object" else tmp_path/"state.pt"
    engine, *loop = private()
    train(*loop)
    saved = dict(module=loop[0], optimizer=loop[1])
    engine.save_checkpoint(path=target, **saved, noise_scheduler=Schedule(3),
        grad_clip_scheduler=Schedule(4), checkpoint_dict={"epoch": 1},
        torch_save_kwargs={"_use_new_zipfile_serialization": True})
    if where == "file object": target.seek(0)
    other, *again = private()
    noise, clip = Schedule(0), Schedule(0)
    found = other.load_checkpoint(path=target, module=again[0], optimizer=again[1],
        noise_scheduler=noise, grad_clip_scheduler=clip)
    assert (found["epoch"], noise.value, clip.value) == (1, 3, 4)
    assert other.accountant.events == engine.accountant.events
    for p, q in zip(loop[0].parameters(), again[0].parameters()): assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop,
                                  lambda ps: torch.optim.SGD(ps, lr=.1, momentum=.9)])
def test_state_from_training_without_privacy_is_warned_of(kind):
    model = nn.Linear(6, 3)
    optimizer = kind(model.parameters())
    LOSS(model(torch.randn(4, 6)), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="tensors of earlier steps.*make a new optimizer"):
        private(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(model, kind(model.parameters()))


def test_bound_that_follows_a_quantile_has_its_count_accounted():
    model = nn.Linear(6, 3)
    engine = PrivacyEngine()
    module, optimizer, loader = engine.make_private(module=model, clip_rule="quantile",
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1.,
        max_grad_norm=5., data_loader=DataLoader(data(), batch_size=8))
    train(module, optimizer, loader)
    event, = engine.accountant.events
    assert (event.steps, event.query) == (5, "gradient and count within the bound")
    assert event.noise_multiplier < 1. # Of gradient and count together
    assert optimizer.max_grad_norm != 5.
