"What a look notices between steps, and what it leaves alone."
import copy
import random
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
from dp_companion.algorithms.private_step import PrivateStep
from looked_at import N, Net, WAYS, data, one_step


pytestmark = pytest.mark.filterwarnings("ignore")


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
def test_saved_buffer_that_is_made_in_a_step_is_refused(way, is_saved):
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


def test_private_optimizer_is_not_copied_and_its_model_not_converted():
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
def test_hook_on_layer_own_output_is_part_of_its_gradient(way):
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
def test_layer_that_runs_again_in_the_backward_pass_is_refused(way):
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
