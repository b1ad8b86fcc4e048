"Models and loops whose samples silently pass their bound: the step and training loops refuse each."
import copy
import enum
import io
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine
from dp_companion.algorithms import noise
from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.gradient_recorder import GradientRecorder
from dp_companion.algorithms.spot_checks import SpotCheck, _check_direction, _check_norm
from dp_companion.algorithms.private_step import PrivateStep

pytestmark = pytest.mark.filterwarnings("ignore")
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


def centred(x): return x - x.mean(0)
def standard_in_secret(z): return (z - z.detach().mean(0))/z.detach().std(0)


MEETING = {
    "before the first layer": lambda: Net(lambda m, x: m.last(m.first(100*centred(x)))),
    "in statistics that no gradient sees": lambda: Net(lambda m,
        x: m.last(standard_in_secret(m.first(x)).tanh())),
    "behind a frozen layer": lambda: Net(lambda m, x: m.last(centred(m.first(x)).tanh()),
        frozen=True),
    "beside a parameter of the model": lambda: Scaled(centred),
}
UNSEEN = {
    "a function of a weight": lambda: Net(lambda m, x: m.last(.001*m.first(x))
        + 30*x@m.first.weight[:3].T),
    "a weight as a second layer": lambda: Net(lambda m,
        x: m.last(F.linear(m.first(x), m.first.weight))),
}


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


@WAYS
@pytest.mark.parametrize("where", MEETING)
def test_samples_that_meet_are_refused_wherever_they_do(way, where):
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"):
        one_step(MEETING[where](), way, *data())


@WAYS
@pytest.mark.parametrize("what", UNSEEN)
def test_a_gradient_that_the_engine_does_not_see_is_refused(way, what):
    with pytest.raises(ValueError, match="must see all of a sample's gradient|must be used by its "
                       "own layer alone|must not exceed its samples' clipped norms"):
        one_step(UNSEEN[what](), way, *data())


@WAYS
def test_a_layer_that_is_called_on_one_row_too_is_expanded_over_the_batch(way):
    model, (x, y) = Net(lambda m, x: m.last(m.first(torch.ones_like(x[:1]))*x.mean(1, keepdim=True)
                                            + .001*m.first(x))), data()
    true = clipped_sum(model, x, y)
    torch.testing.assert_close(one_step(model, way, x, y), true, rtol=1e-6, atol=1e-8)


class Places(nn.Module):
    "What GPT-2 and T5 do: positions are looked up once, for one sample or for none."
    def __init__(self, look):
        super().__init__()
        self.table, self.last, self.look = nn.Embedding(9, 1), nn.Linear(5, 3), look
    def forward(self, x): return self.last((x.unsqueeze(1) + self.look(self.table)).mean(1).tanh())


def relative(table):
    at = torch.arange(5)
    return table(at[:, None] - at + 4).squeeze(-1)


@WAYS
@pytest.mark.parametrize("look", [lambda table: table(torch.arange(5)[None]).transpose(1, 2),
    relative, lambda table: table(torch.arange(5)).T.repeat(2, 1)])
def test_what_is_the_same_for_all_samples_has_the_gradients_of_batches_of_one(way, look):
    model, (x, y) = Places(look), data()
    true = clipped_sum(model, x, y)
    torch.testing.assert_close(one_step(model, way, x, y), true, rtol=1e-6, atol=1e-8)


@WAYS
def test_windows_of_a_sample_are_one_input_of_it(way):
    model, (x, y) = Net(lambda m, x: m.last(m.first(torch.stack([x, 2*x], 1).flatten(0, 1)).tanh()
                                            .unflatten(0, (-1, 2)).mean(1))), data()
    true = clipped_sum(model, x, y)
    torch.testing.assert_close(one_step(model, way, x, y), true, rtol=1e-6, atol=1e-8)


@WAYS
def test_a_batch_in_another_order_than_the_samples_is_refused_or_right(way):
    model, (x, y) = Net(lambda m, x: m.last(m.first(torch.stack([x, 2*x], 0).flatten(0, 1)).tanh()
                                            .unflatten(0, (2, -1)).mean(0))), data()
    with pytest.raises(ValueError, match="samples must not meet|must see all of a sample's"):
        one_step(model, way, x, y)


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


@WAYS
def test_a_layer_that_keeps_its_batch_as_an_attribute_is_refused(way):
    "Under vmap every row would have the whole batch: 38 bounds for one record."
    with pytest.raises(ValueError, match="must see all of a sample's gradient"):
        one_step(ConditionedNet(), way, *data())


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


@WAYS
@pytest.mark.parametrize("what", BEYOND)
def test_a_gradient_that_only_the_engine_sees_is_refused(way, what):
    with pytest.raises(ValueError, match="must see all of a sample's gradient"):
        one_step(Net(BEYOND[what]), way, *data())


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


@pytest.mark.parametrize("kernel", ["matrices", "grouped", "gram", "gram_product", "opacus"])
def test_a_convolution_s_padding_is_what_it_is_now(kernel):
    "As when networks are rebuilt for dilation: an unpadded corner moved the sum by 125 bounds."
    def build():
        layer = nn.Conv2d(1, 4, 3, padding=4)
        layer.padding = (0, 0)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(4*36, 3))
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1] = 0
    x[1, 0, 5:, 5:] = 1e3
    assert moved(build, x, torch.arange(8) % 3, 1, kernels={"0": kernel}) <= 1 + 1e-9


class Tempered(nn.Module):
    "A layer with a parameter of its own, and a number that the loop changes."
    def __init__(self):
        super().__init__()
        self.gain, self.last, self.heat = nn.Parameter(torch.ones(5)), nn.Linear(5,
            3).requires_grad_(False), .05
    def forward(self, x): return self.last(x*self.gain*self.heat)


def test_a_layer_is_measured_as_it_is_now():
    def change(model, t): model[0].heat = .05 if t < 5 else 5.
    x, y = data()
    assert moved(lambda: nn.Sequential(Tempered()), x, y, 3, steps=7, change=change) <= 1 + 1e-9


@WAYS
def test_autocast_inside_a_model_is_refused(way):
    def rounded(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16): return model.last(model.first(x)).double()
    with pytest.raises(ValueError, match="must run in the parameters' own precision, got autocast"):
        one_step(Net(rounded), way, *data())


def test_looks_are_not_spent_on_batches_of_one():
    model, (x, y) = MEETING["behind a frozen layer"]().double(), data()
    step = PrivateStep(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad],
        lr=.1), clip_rule=Flat(), expected_batch_size=8, noise_multiplier=1.)
    for k in range(3): step(nn.CrossEntropyLoss(), x[k:k+1], y[k:k+1])
    with pytest.raises(ValueError, match="samples must not meet"): step(nn.CrossEntropyLoss(), x, y)


@WAYS
def test_a_model_may_take_a_gradient_on_its_way(way):
    "As adversarial examples do: what it asks of its layers then is not the loss's."
    def adversarial(model, x):
        z = x.detach().requires_grad_(True)
        g, = torch.autograd.grad(F.cross_entropy(model.last(model.first(z).tanh()),
            torch.zeros(len(x), dtype=torch.long), reduction="sum"), z)
        return model.last(model.first(x + .01*g.sign()).tanh())
    torch.manual_seed(0)
    model, (x, y) = Net(adversarial).double(), data()
    expected = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for a, b in zip(x, y):
        g = torch.cat([p.flatten() for p in torch.autograd.grad(F.cross_entropy(model(a[None]),
            b[None]), list(model.parameters()))])
        expected += g*min(1, 1/g.norm())
    torch.testing.assert_close(one_step(model, way, x, y), expected, rtol=1e-9, atol=1e-10)


def test_a_hook_that_comes_later_is_a_function_behind_its_layer():
    model, (x, y) = Net(lambda m, x: m.last(m.first(x))).double(), data()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.),
                       clip_rule=Flat(max_grad_norm=1.), expected_batch_size=1, noise_multiplier=0.)
    for _ in range(3): step(nn.CrossEntropyLoss(), x, y)
    model.first.register_forward_hook(lambda layer, args, output: 5*output)
    step(nn.CrossEntropyLoss(), x, y) # Which nobody looks at
    torch.testing.assert_close(step.recorder.flat, clipped_sum(model, x, y), rtol=1e-9, atol=1e-10)


class Listed(nn.Module):
    "Parameters in a container."
    def __init__(self):
        super().__init__()
        self.held = nn.ParameterList([torch.full((5,), 2.), torch.zeros(5)])
    def forward(self, x): return x*self.held[0] + self.held[1]


OWNED = {
    "parameters in a list": Listed,
    "a parametrization of all there is": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5,
        5, bias=False)),
    "a hook in front": lambda: hooked_in_front(nn.PReLU(5)),
}


def hooked_in_front(layer):
    layer.register_forward_pre_hook(lambda layer, args: (3*args[0],))
    return layer


@WAYS
@pytest.mark.parametrize("what", OWNED)
def test_a_layer_without_a_formula_is_measured_as_it_computes(way, what):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(OWNED[what](), nn.Linear(5, 3)).double(), data()
    expected = clipped_sum(model, x, y)
    torch.testing.assert_close(one_step(model, way, x, y), expected, rtol=1e-9, atol=1e-10)


def test_words_may_be_a_view():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(4, 5), nn.Linear(5, 3)
        def forward(self, x):
            return self.last(x + self.words(torch.arange(2).expand(len(x), 2)).sum(1))
    one_step(Words(), "step", *data())


@WAYS
def test_a_layer_may_be_called_again(way):
    model, (x, y) = Net(lambda m, x: m.last(m.first(x) + m.first(2*x))), data()
    expected, found = clipped_sum(model, x, y), one_step(model, way, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


class Packed(nn.Module):
    "Sequences of one or two words."
    def __init__(self):
        super().__init__()
        self.layer, self.last = DPLSTM(2, 4, batch_first=True), nn.Linear(4, 3)
    def forward(self, x):
        lengths = 1 + (x[:, 0] > 0).long()
        return self.last(self.layer(nn.utils.rnn.pack_padded_sequence(x[:, 1:].reshape(len(x), 2,
            2), lengths, batch_first=True, enforce_sorted=False))[1][0][-1])


def test_packed_sequences_are_refused_with_what_to_do():
    step = PrivateStep(model := Packed(), torch.optim.SGD(model.parameters(), lr=.1),
                       clip_rule=Flat(), expected_batch_size=N, noise_multiplier=1.)
    with pytest.raises(ValueError,
                       match="pad sequences instead of packing them|padded and not packed"):
        step(nn.CrossEntropyLoss(), data()[0].float(), data()[1])


@WAYS
def test_a_bad_record_does_not_free_the_others(way):
    "With dropout, a second pass has masks and so norms of its own."
    x, y = data(2)
    x[1] = torch.nan
    for seed in range(20):
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(.9), nn.Linear(64, 3))
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(seed))
        assert one_step(model, way, 10*x, y).norm() <= 1 + 1e-9


@WAYS
def test_a_model_that_draws_from_elsewhere_is_left_alone(way):
    "Two passes of it differ, so that nothing can be said of it."
    draws = iter(range(1, 10**6))
    one_step(Net(lambda m, x: m.last(m.first(x))*next(draws)), way, *data())


@pytest.mark.parametrize("workers", [0, 2])
def test_one_generator_for_noise_and_batches_draws_no_noise_twice(workers, monkeypatch):
    keys, drawn, shared = [], noise.gaussian_, torch.Generator().manual_seed(1)
    monkeypatch.setattr(noise, "gaussian_", lambda out, key, *rest, **options: keys.append(key)
                        or drawn(out, key, *rest, **options))
    model = nn.Linear(5, 3).double()
    model, optimizer, loader = PrivacyEngine().make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), max_grad_norm=1., noise_multiplier=1.,
        data_loader=DataLoader(TensorDataset(*data(64)), batch_size=8, num_workers=workers,
                               generator=shared), noise_generator=shared)
    for stop in (2, 8):
        for k, (x, y) in enumerate(loader):
            if k == stop: break
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
    assert len(keys) == 2 + 6 and len(set(keys)) == len(keys)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_batch_without_a_step_is_noticed_whatever_workers_hold(workers):
    model = nn.Linear(5, 3).double()
    model, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), max_grad_norm=1., noise_multiplier=1.,
        data_loader=DataLoader(TensorDataset(*data(80)), batch_size=8, num_workers=workers))
    with pytest.raises(ValueError, match="every batch of the returned data loader must have its "
                       "optimizer.step, an empty one too, got 1 without one"):
        for k, (x, y) in enumerate(loader):
            if k == 6: continue
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
    assert len(optimizer.ledger) == 6


@WAYS
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_buffer_that_is_made_in_a_step_is_refused_if_it_is_saved(way, is_saved):
    def keeping(m, x):
        m.register_buffer("mean", torch.zeros(5) if not is_saved else x.mean(0).detach(),
                          persistent=is_saved)
        return m.last(m.first(x))
    model = Net(keeping)
    if not is_saved: return one_step(model, way, *data())
    with pytest.raises(ValueError,
                       match="no buffer may change in a private step, got a change of 'mean'"):
        one_step(model, way, *data())
    assert "mean" not in model.state_dict()


@WAYS
def test_words_for_what_cannot_be_clipped(way):
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.drop, self.last = nn.Parameter(torch.zeros(5)), nn.Dropout(
                .5), nn.Linear(5, 3)
        def forward(self, x): return self.last(self.drop(x + self.token))
    with pytest.raises(ValueError, match="Dropout inside Stem at '' gives another result"):
        one_step(Stem(), way, *data())


def test_a_private_optimizer_is_not_copied_and_its_model_not_converted():
    model = nn.Linear(5, 3)
    private, optimizer, loader = PrivacyEngine().make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), max_grad_norm=1., noise_multiplier=1.,
        data_loader=DataLoader(TensorDataset(*data()), batch_size=8))
    with pytest.raises(TypeError, match="must not be copied or pickled"): copy.deepcopy(optimizer)
    private.double()
    with pytest.raises(ValueError, match="parameters must stay as the private step was built with "
                       "them, got torch.float64 on cpu"):
        private(data()[0])


def test_a_padding_word_has_no_gradient_in_a_shared_table():
    "Against one sample after the other."
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(7, 5, padding_idx=0), nn.Linear(5, 3)
        def forward(self, pair):
            return self.last((self.words(pair[:, 0])*self.words(pair[:, 1])).mean(1))
    torch.manual_seed(0)
    pairs, y = torch.randint(0, 7, (6, 2, 4)), torch.arange(6) % 3
    model = Twice().double()
    with torch.no_grad(): model.words.weight[0] = 1.
    alone = [torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(p[None]),
        t[None]), list(model.parameters()))]) for p, t in zip(pairs, y)]
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1),
                       clip_rule=Flat(max_grad_norm=.05), expected_batch_size=1,
                       noise_multiplier=0.)
    step(nn.CrossEntropyLoss(), pairs, y)
    expected = sum(g*min(1, .05/g.norm()) for g in alone)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), expected,
                               rtol=1e-9, atol=1e-12)


def test_statistics_that_were_kept_are_those_of_the_gradient():
    "Instance norm in evaluation mode inside a model that trains."
    torch.manual_seed(0)
    model = nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.Flatten(),
                          nn.Linear(48, 2)).double()
    model[0].running_mean += .5
    model[0].running_var *= 3
    model[0].eval()
    x, y = torch.randn(4, 3, 4, 4, dtype=torch.float64), torch.arange(4) % 2
    alone = [torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(a[None]),
        t[None]), list(model.parameters()))]) for a, t in zip(x, y)]
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1),
                       clip_rule=Flat(max_grad_norm=.1), expected_batch_size=1, noise_multiplier=0.)
    step(nn.CrossEntropyLoss(), x, y)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]),
                               sum(g*min(1, .1/g.norm()) for g in alone), rtol=1e-9, atol=1e-12)


class Centre(nn.Module):
    "Keeps a mean of its inputs where nothing is trained, as codebooks and centres do."
    def __init__(self, keep):
        super().__init__()
        self.layer, self.mean, self.keep = nn.Linear(5, 3), nn.Parameter(torch.zeros(5),
            requires_grad=False), keep

    def forward(self, x):
        if self.training: self.keep(self, x.detach().mean(0))
        return self.layer(x)


def in_place(model, mean):
    with torch.no_grad(): model.mean.copy_(mean)


def past_the_counter(model, mean): model.mean.data.copy_(mean)


def anew(model, mean): model.mean = nn.Parameter(mean, requires_grad=False)


def born(model, mean): model.other = nn.Parameter(mean, requires_grad=False)


@pytest.mark.parametrize("keep, name", [(in_place, "mean"), (past_the_counter, "mean"),
    (anew, "mean"), (born, "other")])
@WAYS
def test_a_frozen_parameter_that_keeps_raw_statistics_is_refused(way, keep, name):
    model = Centre(keep)
    with pytest.raises(ValueError,
                       match="no frozen parameter may change in a private step, got a change of "
                       f"'{name}'"):
        one_step(model, way, *data())
    assert model.mean.abs().sum() == 0


@pytest.mark.parametrize("kind, keep", [("frozen parameter", in_place),
    ("buffer", past_the_counter)])
def test_what_is_not_trained_is_looked_at_in_every_pass(kind, keep):
    model, (x, y) = Centre(lambda model, mean: None), data()
    if kind == "buffer":
        del model.mean
        model.register_buffer("mean", torch.zeros(5))
    step = PrivateStep(model.double(), torch.optim.SGD(model.layer.parameters(), lr=.1),
                       clip_rule=Flat(), expected_batch_size=8, noise_multiplier=1.)
    for _ in range(3): step(nn.CrossEntropyLoss(), x, y)
    model.keep = keep
    with pytest.raises(ValueError, match=f"no {kind} may change"): step(nn.CrossEntropyLoss(), x, y)


def hooked(function): # Of the first layer's activation
    def forward(model, x):
        h = model.first(x).relu()
        if h.requires_grad: h.register_hook(function)
        return model.last(h)
    return lambda: Net(forward)


SIZES = {"clamped": lambda g: g.clamp(-1e-3, 1e-3),
         "normalised": lambda g: g/(g.norm(dim=-1, keepdim=True)+1e-12), "signed": torch.sign}


@WAYS
@pytest.mark.parametrize("size", SIZES)
def test_a_backward_pass_may_go_by_size(way, size):
    "The resulting gradient is clipped; ghost clipping's second pass would break the bound."
    assert one_step(hooked(SIZES[size])(), way, *data()).norm() <= N*(1+1e-9)


@WAYS
def test_a_hook_on_a_layer_s_own_output_is_a_part_of_its_gradient(way):
    "A reversal of the gradient: the layer in front of it must go the other way."
    def forward(model, x):
        h = model.first(x)
        if h.requires_grad: h.register_hook(torch.neg)
        return model.last(h)
    x, y = data()
    torch.manual_seed(0)
    model = Net(forward).double()
    F.cross_entropy(model(x/1e3), y, reduction="sum").backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    norms = [torch.cat([g.flatten()
                        for g in torch.autograd.grad(F.cross_entropy(model(row[None]/1e3),
                            label[None]), list(model.parameters()))]).norm() for row,
                            label in zip(x, y)]
    assert max(norms) < 1 # Nothing is clipped
    model.zero_grad()
    torch.testing.assert_close(one_step(model, way, x/1e3, y), wanted, rtol=1e-6, atol=1e-9)


def test_a_buffer_that_changes_without_gradients_is_refused():
    "Accuracy on the training images, taken in training mode."
    x, y = data()
    model = nn.Sequential(nn.InstanceNorm1d(5, track_running_stats=True), nn.Flatten(),
                          nn.Linear(10, 3)).double().eval()
    made = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    before = model[0].running_mean.clone()
    made[0].train()
    with torch.no_grad(), pytest.raises(ValueError,
            match="no buffer may change in a private step, got a change of '0.running_mean'"):
        made[0](x[:, :, None].expand(-1, -1, 2))
    assert torch.equal(model[0].running_mean, before)


@WAYS
def test_a_layer_that_runs_again_in_the_backward_pass_is_refused(way):
    "Activation checkpointing, whose second forward pass no engine would see."
    def again(model, x):
        return model.last(checkpoint(lambda z: model.first(z).relu(), x, use_reentrant=False))
    with pytest.raises(ValueError, match="no layer may run again in the backward pass, got a "
                       "Linear that did, as by torch.utils.checkpoint"):
        one_step(Net(again), way, *data())


@WAYS
@pytest.mark.parametrize("draw", ["torch", "NumPy", "Python"])
def test_rows_that_meet_by_chance_are_refused_whoever_draws(way, draw):
    "Mixup with NumPy's draw, as in its authors' code: an unrepeatable pass would prove nothing."
    shares = {"torch": lambda: torch.rand(()).item(), "NumPy": lambda: np.random.beta(1., 1.),
              "Python": random.random}
    def mixed(model, x):
        share = .2 + .6*shares[draw]()
        return model.last(model.first(share*x + (1-share)*x.flip(0)).relu())
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"):
        one_step(Net(mixed), way, *data())


@pytest.mark.parametrize("draw", [lambda: np.random.random(), random.random,
                                  lambda: torch.rand(()).item()])
def test_a_look_leaves_the_user_s_random_numbers_alone(draw):
    model, (x, y) = Net(lambda model,
                        x: model.last(F.dropout(model.first(x), p=.2 + 0*draw()))).double(), data()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1), clip_rule=Flat(),
                       expected_batch_size=N, noise_multiplier=1.,
                       generator=torch.Generator().manual_seed(0))
    def drawn(passes):
        random.seed(0); np.random.seed(0); torch.manual_seed(0)
        for _ in range(passes): model(x)
        return draw()
    step.spot_check.passes = (0, 0) # A look, and a pass
    random.seed(0); np.random.seed(0); torch.manual_seed(0)
    step(nn.CrossEntropyLoss(), x, y)
    assert draw() == drawn(1)


class Scaling(nn.Module):
    "A scale of one's own, which may be taken in place."
    def __init__(self, inplace):
        super().__init__()
        self.gamma, self.inplace = nn.Parameter(torch.full((5,), .9)), inplace
    def forward(self, x): return x.mul_(self.gamma) if self.inplace else x*self.gamma


@WAYS
def test_a_layer_that_changes_its_own_input_is_refused(way):
    "Its gradient is made of the input, which would be the output by then."
    def net(inplace):
        return nn.Sequential(nn.Linear(5, 5), Scaling(inplace), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match="layer '1' must not change its input in place"):
        one_step(net(True), way, *data())
    one_step(net(False), way, *data())


def test_a_pass_that_does_not_repeat_is_warned_of():
    draws = np.random.default_rng(0)
    def scaled(model, x): return model.last(model.first(x).relu()*(1 + draws.random()))
    with pytest.warns(UserWarning,
                      match="another loss when a pass is repeated with the same random numbers"):
        one_step(Net(scaled), "step", *data())


@pytest.mark.parametrize("function", [lambda x: F.dropout(x, .1), lambda x: x if x.max()>0 else -x])
def test_a_module_with_parameters_of_its_own_says_what_it_must_be(function):
    with pytest.raises(ValueError, match="a module with parameters of its own must treat every "
                       "sample alike, without chance, .*, got a Scaled"):
        one_step(Scaled(function), "step", *data())


@WAYS
def test_a_look_leaves_the_user_s_batch_alone(way):
    "A model may change its own input; a pass that is only a look must not."
    def shifted(model, x): return model.last(model.first(x.sub_(1.)).relu())
    (x, y), net = data(), Net(shifted).double()
    sums = clipped_sum(net, x, y)
    torch.testing.assert_close(one_step(net, way, x.clone(), y), sums, rtol=1e-6, atol=1e-8)


class Attending(nn.Module):
    "A class token of one's own beside attention, whose gradients are formed together."
    def __init__(self):
        super().__init__()
        self.token, self.attention, self.last = nn.Parameter(torch.zeros(1, 1,
            6)), nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)
    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x.unsqueeze(1).expand(-1, 2, -1)], 1)
        return self.last(self.attention(x, x, x, need_weights=False)[0][:, 0])


def test_attention_inside_a_module_with_parameters_of_its_own_is_taken():
    model, x, y = Attending().double(), torch.randn(8, 6, dtype=torch.float64), torch.arange(8)%3
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.),
                       clip_rule=Flat(max_grad_norm=1e6), expected_batch_size=8,
                       noise_multiplier=0.)
    true = torch.autograd.grad(nn.CrossEntropyLoss()(model(x), y), list(model.parameters()))
    step(nn.CrossEntropyLoss(), x, y)
    for p, g in zip(model.parameters(), true): torch.testing.assert_close(p.grad, g)


def test_reentrant_checkpointing_is_refused_in_a_sentence():
    def again(model, x):
        return model.last(checkpoint(torch.relu, model.first(x), use_reentrant=True))
    with pytest.raises(RuntimeError, match="torch.utils.checkpoint is incompatible"):
        one_step(Net(again), "step", *data())


class Masked(ConditionedNet):
    def forward(self, x): return super().forward(x).masked_fill(torch.arange(3) == 2, -torch.inf)


def test_what_is_not_finite_ends_no_look():
    "Neither a masked output, nor another record."
    x, y = data()
    model = Masked().double()
    module, _, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    with pytest.raises(ValueError, match="must see all of a sample's gradient"): module(x)
    with pytest.raises(ValueError, match="must see all of a sample's gradient"):
        one_step(ConditionedNet(), "step", x.index_fill(0, torch.tensor([2]), torch.nan), y)


def test_a_derivative_that_becomes_an_output_is_refused():
    "A small one is less than a look sees."
    def forced(model, x):
        x = x.detach().requires_grad_(True)
        out = model.last(model.first(x).tanh())
        return out + 1e-6*torch.autograd.grad(out.sum(), x, create_graph=True)[0].pow(2).sum(1,
            keepdim=True)
    with pytest.raises(ValueError, match="as where a derivative is part of the loss"):
        one_step(Net(forced), "step", *data())


def test_a_look_goes_not_back_into_what_made_the_input():
    encoder, model, (x, y) = nn.Linear(5, 5).double(), nn.Linear(5, 3).double(), data()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.), clip_rule=Flat(),
                       expected_batch_size=N, noise_multiplier=1.)
    found = []
    for looks in (True, False):
        if not looks: step.spot_check.passes = (3, 3)
        own = x.clone().requires_grad_(True)
        step(nn.CrossEntropyLoss(), own, y)
        found.append(own.grad)
        step.spot_check.passes = (0, 0)
        step(nn.CrossEntropyLoss(), encoder(x).tanh(), y)
    torch.testing.assert_close(*found)


class Keeping(nn.Module):
    "A parameter of its own, a layer inside with a hook of the user's, and its last output at hand."
    def __init__(self):
        super().__init__()
        self.gain, self.inner, self.act, self.kept = nn.Parameter(torch.full((5,), .7)), nn.Linear(
            5, 5), nn.Tanh(), None
        self.act.register_forward_hook(lambda layer, args, output: 2*output)
    def forward(self, x):
        self.kept = self.act(self.inner(x)*self.gain)
        return self.kept


@WAYS
def test_a_layer_may_keep_its_output_and_hold_hooks_inside(way):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(Keeping(), nn.Linear(5, 3)).double()
    model, (x, y), expected = build(), data(), 0
    for a, b in zip(x, y):
        g = torch.cat([p.flatten() for p in torch.autograd.grad(F.cross_entropy(model(a[None]),
            b[None]), list(model.parameters()))])
        expected = expected + g*min(1, 1/g.norm())
    torch.testing.assert_close(one_step(build(), way, x, y), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("padding", [0, (1,), "same", "valid"])
@pytest.mark.parametrize("kernel", ["matrices", "grouped", "gram", "gram_product", "opacus"])
def test_a_padding_may_be_written_as_torch_takes_it(padding, kernel):
    def build():
        layer = nn.Conv2d(1, 4, 3, padding=1)
        layer.padding = padding
        return nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert moved(build, x, torch.arange(8) % 3, 1, kernels={"0": kernel}) <= 1 + 1e-9


class TiedWords(nn.Module):
    "A language model with one table for words and answers, and a parameter of its own for places."
    def __init__(self):
        super().__init__()
        self.words, self.places, self.inner, self.answers = nn.Embedding(7,
            4), nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.answers.weight = self.words.weight
    def forward(self, x):
        return self.answers(self.inner(self.words(x) + self.places).tanh()).mean(1)


@WAYS
def test_weights_may_be_tied_beside_a_parameter_of_the_model_itself(way):
    "Opacus's copy of such a module reads memory that nobody has written."
    torch.manual_seed(0)
    model, x = TiedWords(), torch.randint(7, (N, 5), generator=torch.Generator().manual_seed(0))
    expected = clipped_sum(model, x, data()[1])
    torch.testing.assert_close(one_step(model, way, x, data()[1]), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("function, word", [(lambda x: F.dropout(x, .1), "without chance"),
    (lambda x: x if random.random() < 2 else -x, "without chance"),
    (lambda x: x*(np.random.random() < 2), "without chance")])
def test_chance_beside_a_parameter_of_its_own_is_refused_at_the_first_draw(function, word):
    "A second run of it, for its rows, draws other numbers."
    with pytest.raises(ValueError, match=word): one_step(Scaled(function), "step", *data())


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0),
                                       torch.Generator()])
def test_a_generator_beside_a_parameter_of_its_own_is_refused(generator):
    model = Scaled(lambda x: x)
    model.draws = generator
    with pytest.raises(ValueError, match="the .* 'draws' inside Scaled at '' gives another result"):
        one_step(model, "step", *data())


class Counted(nn.Module):
    "Counts its passes, as a warm-up of one's own does."
    def __init__(self): super().__init__(); self.last, self.passes = nn.Linear(5, 3), 0
    def forward(self, x):
        self.passes += 1
        return self.last(x)/self.passes


@WAYS
def test_a_look_is_no_pass_to_a_model_that_counts_them(way):
    model = Counted()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="Secure RNG|Full backward hook")
        one_step(model, way, *data())
    assert model.passes == 1


def test_a_count_beside_a_parameter_of_its_own_is_refused():
    def slower(x):
        model.passes += 1
        return x/model.passes
    model = Scaled(slower)
    model.passes = 0
    with pytest.raises(ValueError, match="which changes 'passes'"): one_step(model, "step", *data())


class Remembering(nn.Module):
    "Keeps what came, and what it has made for batches of a size."
    class Mode(enum.IntEnum): A = 1
    def __init__(self):
        super().__init__()
        (self.scale, self.last, self.made, self.history, self.rows, self.mode,
         self.activations) = (nn.Parameter(torch.ones(5)), nn.Linear(5, 3), {}, [], 0,
                              self.Mode.A, [torch.tanh])
    def forward(self, x):
        self.rows = len(x)
        self.history.append(x.detach())
        if self.rows not in self.made: self.made[self.rows] = x.new_ones(self.rows, 5)
        return self.last(self.activations[0](x*self.made[self.rows]*self.scale).view(self.rows, -1))


@WAYS
def test_a_module_with_parameters_of_its_own_may_remember(way):
    model, (x, y) = Remembering().double(), data()
    expected, found = clipped_sum(model, x, y), one_step(model, way, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert list(model.made) == [N] and len(torch.cat(model.history)) == N and model.rows == N


@WAYS
def test_a_model_may_call_its_functions_activations(way):
    model, (x, y) = Net(lambda m, x: m.last(m.activations[0](m.first(x)))).double(), data()
    model.activations = [torch.tanh]
    expected, found = clipped_sum(model, x, y), one_step(model, way, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert model.activations == [torch.tanh]


class Answer:
    "A plain object, as some models give."
    def __init__(self, logits): self.logits, self.itself = logits, self


def test_an_empty_batch_has_an_answer_of_any_kind():
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.last = nn.Linear(5, 3)
        def forward(self, x): return Answer(self.last(x))
    model, (x, y) = Model().double(), data()
    made = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=1))
    sizes = []
    for inputs, targets in made[-1]:
        answer = made[0](inputs)
        assert answer.logits.shape == (len(inputs), 3) and answer.itself is answer
        (F.cross_entropy(answer.logits, targets, reduction="sum")/max(len(targets), 1)).backward()
        made[1].step()
        sizes.append(len(inputs))
    assert 0 in sizes and max(sizes) > 0


@pytest.mark.parametrize("owns", [False, True])
def test_a_copy_of_a_private_model_is_the_users_own(owns):
    "In the middle of a step, when layers hold raw batches."
    model, (x, y) = (Scaled(torch.tanh) if owns else Net(lambda m,
        x: m.last(m.first(x)))).double(), data()
    expected = model(x).detach()
    made = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    inputs, targets = next(iter(made[-1]))
    F.cross_entropy(made[0](inputs), targets).backward()
    assert copy.copy(made[0]) is model
    own = copy.deepcopy(made[0])
    assert type(own) is type(model)
    F.cross_entropy(own(x), y).backward() # As any other model's
    torch.testing.assert_close(own.eval()(x), expected)
    model.function, buffer = None, io.BytesIO() # It has no name that pickle knows
    torch.save(made[0], buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).state_dict().keys() == own.state_dict().keys()


class Forces(nn.Module):
    "A layer that is used for a gradient on the way, and again."
    def __init__(self):
        super().__init__()
        self.inner, self.energy, self.last = nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(5, 3)
    def forward(self, x):
        x = x.detach().requires_grad_()
        force, = torch.autograd.grad(self.energy(self.inner(x).tanh()).sum(), x)
        return self.last(self.inner(x).tanh() + force)


@WAYS
def test_a_layer_may_be_used_for_a_gradient_on_the_way(way):
    model, (x, y) = Forces().double(), data()
    expected, found = clipped_sum(model, x, y), one_step(model, way, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("what", BEYOND)
def test_another_record_that_is_not_finite_ends_no_look_at_a_direction(what):
    x, y = data()
    with pytest.raises(ValueError, match="must see all of a sample's gradient"):
        one_step(Net(BEYOND[what]), "step", x.index_fill(0, torch.tensor([2]), torch.nan), y)


def test_a_look_leaves_an_input_its_gradient():
    def adversarial(m, x):
        g, = torch.autograd.grad(F.cross_entropy(m.last(m.first(x).tanh()),
            torch.zeros(len(x), dtype=torch.long), reduction="sum"), x)
        return m.last(m.first(x + .01*g.sign()).tanh())
    x, y = data()
    one_step(Net(adversarial), "step", x.requires_grad_(True), y)


def test_looks_take_other_samples_in_turn():
    model = nn.Linear(5, 3)
    looks, found = SpotCheck(model, GradientRecorder(model)), []
    for _ in range(9):
        if looks.is_due(N): found.append(looks.sample(N))
        looks.count(N)
    assert found == [8, 9, 10, 12, 0] and looks.passes == (0, 9)


def test_a_step_counts_its_passes():
    model, (x, y) = nn.Linear(5, 3).double(), data()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1), clip_rule=Flat(),
                       expected_batch_size=N, noise_multiplier=1.)
    for rows in (1, N, N): step(nn.CrossEntropyLoss(), x[:rows], y[:rows])
    assert step.spot_check.passes == (1, 2)


@pytest.mark.parametrize("found, lone, fits", [(1., 1., True), (.9999, 1., False), (1.02, 1., True),
    (0., 1e-19, True), (torch.inf, 1e19, True), (torch.inf, 1., False)])
def test_a_norm_is_held_to_the_one_of_ordinary_differentiation(found, lone, fits):
    if fits: return _check_norm(found, lone)
    with pytest.raises(ValueError, match="must see all of a sample's gradient, got a norm of"):
        _check_norm(found, lone)


@pytest.mark.parametrize("found, lone, fits", [([1., 1e-7], [1., 0.], True),
    ([1., .02], [1., 0.], False), ([1., .005], [1., 0.], False),
    ([0., 1e-19], [1e-19, 0.], True),
    ([1., torch.inf], [1., 0.],
        True)])
def test_a_gradient_is_held_to_the_one_of_ordinary_differentiation(found, lone, fits):
    flat = torch.tensor(found, dtype=torch.float64)
    recorder = SimpleNamespace(flat=flat, slots=dict(weight=SimpleNamespace(shaped=flat)))
    if fits: return _check_direction(recorder, (torch.tensor(lone, dtype=torch.float64),))
    with pytest.raises(ValueError, match="got one that is 0.0.* of its norm away"):
        _check_direction(recorder, (torch.tensor(lone, dtype=torch.float64),))


class MaskedScores(ConditionedNet):
    def forward(self, x):
        out = super().forward(x)
        return out, out.sum(1).masked_fill(torch.ones(len(x), dtype=torch.bool), -torch.inf)


def test_one_number_a_sample_that_is_not_finite_ends_no_look():
    model, (x, y) = MaskedScores().double(), data()
    module, *_ = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    with pytest.raises(ValueError, match="must see all of a sample's gradient"): module(x)


def test_outputs_without_a_batch_in_front_are_warned_of_in_the_first_pass_alone():
    model, (x, y) = Net(lambda m, x: m.last(m.first(x)).T).double(), data()
    module, *_ = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    with pytest.warns(UserWarning, match="no output of the module has the batch in front"):
        module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2): module(x)


def test_a_derivative_that_becomes_an_output_is_refused_where_the_layer_is_in_it_alone():
    def forced(m, x):
        x = x.detach().requires_grad_(True)
        return m.last(x + 1e-6*torch.autograd.grad(m.first(x).sum(), x, create_graph=True)[0])
    with pytest.raises(ValueError, match="as where a derivative is part of the loss"):
        one_step(Net(forced), "step", *data())
