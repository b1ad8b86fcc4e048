"The private step against its oracles, on all networks, in several processes."
import copy
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.layers import DPLSTM
from scipy import stats
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine
from dp_companion.algorithms import book_keeping, per_sample_norms, spot_checks
from dp_companion.algorithms.clipping import (
    PSAC, AutoS, ClipRule, Flat, Global, GlobalAdapt, GlobalAdaptV2, GroupAdaptive
)
from dp_companion.algorithms.gradient_recorder import per_sample_losses
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.training.models import _MODELS, build_model
from dp_companion.papers.sanitization.run import LAYERED
from networks import batch, cifar_cnn, digits_cnn, mnist_cnn, opacus_resnet18, group_norm_resnet18
from steps import LOSS, difference, gradient, network, seeded, step_for
from oracles.opacus_engines import ORACLES, one_by_one, opacus_hooks


def against_oracles(build, x, y, rule=Flat(max_grad_norm=.5), names=("ghost", "hooks"),
                    nearly=1e-9):
    "The gradient of a step without noise, the same by every oracle up to rounding."
    step = step_for(build(), clip_rule=rule)
    report = step(LOSS, x, y)
    for name in names:
        total, norms = ORACLES[name](build(), LOSS, x, y, rule.scale)
        assert difference(gradient(step), total/8) < nearly
        assert difference(report.nonprivate_norms, norms.detach()) < nearly
    return gradient(step)


SMALL = [mnist_cnn, digits_cnn, cifar_cnn]


@pytest.mark.parametrize("build", SMALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rule", [Flat(max_grad_norm=.5), AutoS()], ids=["flat", "auto_s"])
def test_the_step_is_that_of_every_oracle_in_float64(build, rule):
    x, y = batch(build, 6, dtype=torch.float64)
    against_oracles(lambda: network(build, torch.float64), x, y, rule, ORACLES)


@pytest.mark.parametrize("build", SMALL, ids=lambda f: f.__name__)
def test_the_step_is_that_of_every_oracle_in_float32(build):
    against_oracles(lambda: network(build), *batch(build, 6), names=ORACLES, nearly=1e-5)


def test_the_step_is_that_of_opacus_on_resnet():
    x, y = batch(group_norm_resnet18, 4, dtype=torch.float64)
    found = against_oracles(lambda: network(opacus_resnet18, torch.float64), x, y)
    in_place = step_for(network(group_norm_resnet18, torch.float64))
    in_place(LOSS, x, y)
    assert difference(gradient(in_place), found) < 1e-9


SIDES = {"mnist_cnn": 28, "unbalanced_mnist_cnn": 28, "small_shufflenet": 24} # of the rest 32


def built(name, side, channels):
    "A network of the companion, with an empty sanitization layer where it is built around one."
    if name in LAYERED and name not in _MODELS:
        return LAYERED[name](12, sanitization=nn.Identity(), image_size=side, channels=channels,
                             classes=5, **({"black": -1.} if name == "pooled_rows" else {}))
    if name == "nf_net_f0, all layers":
        return build_model("nf_net_f0", seed=0, classes=5, pretrained=False, trainable="all")
    return build_model(name, seed=0, image_size=side, channels=channels, classes=5,
                       **({"pretrained": False} if name.startswith(("nf_net", "resnet50")) else {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*_MODELS, *LAYERED, "nf_net_f0, all layers"}))
def test_the_step_is_that_of_opacus_on_every_model(name):
    if name.startswith("nf_net"):
        pytest.importorskip("timm", reason="timm is not installed (the extra `vision`)")
    side, channels = SIDES.get(name, 32), 1 if name in SIDES else 3
    is_small = not name.startswith(("nf_net", "resnet50", "sanitization_resnet18"))
    for dtype, nearly in ((torch.float64, 1e-9), (torch.float32, 1e-5))[:1 + is_small]:
        x, y = torch.randn(2, channels, side, side, dtype=dtype, generator=seeded()), torch.tensor(
            [0, 1])
        against_oracles(lambda: network(lambda: built(name, side, channels), dtype), x, y,
                        nearly=nearly)


class Recurrent(nn.Module):
    "Opacus's recurrent layer, which registers its children's parameters again, without its states."
    def __init__(self):
        super().__init__()
        self.layer = DPLSTM(3, 2, batch_first=True, bidirectional=True)
    def forward(self, x): return self.layer(x)[0]


class Gain(nn.Module):
    "A layer whose parameter has no dimension."
    def __init__(self): super().__init__(); self.gain = nn.Parameter(torch.tensor(1.5))
    def forward(self, x): return self.gain*x


KINDS_OF_LAYERS = {
    "scalar": (Gain(), (4,)), "recurrent": (Recurrent(), (5, 3)),
    "linear": (nn.Linear(4, 3), (4,)), "linear, positions": (nn.Linear(4, 3, bias=False), (5, 4)),
    "convolution": (nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "groups, stride": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), groups=2), (4, 8, 7)),
    "dilation": (nn.Conv2d(3, 4, 3, dilation=2), (3, 7, 7)),
    "padding same": (nn.Conv2d(3, 4, 3, padding="same"), (3, 5, 5)),
    "convolution 1d": (nn.Conv1d(3, 4, 2), (3, 8)), "convolution 3d": (nn.Conv3d(2, 3, 2),
        (2, 4, 3, 5)),
    "group norm": (nn.GroupNorm(2, 6), (6, 4, 3)),
    "instance norm": (nn.InstanceNorm2d(6, affine=True), (6, 4, 3)), "layer norm": (nn.LayerNorm(4),
        (5, 4)),
    "embedding": (nn.Embedding(7, 3), (9,)), "RMS norm": (nn.RMSNorm(4), (2, 4)),
}


@pytest.mark.parametrize("kind", KINDS_OF_LAYERS)
def test_the_step_is_that_of_every_oracle_on_every_layer(kind):
    layer, shape = KINDS_OF_LAYERS[kind]
    x = torch.randint(7, (6, *shape), generator=seeded()) if kind == "embedding" else torch.randn(6,
        *shape, dtype=torch.float64, generator=seeded())
    y, model = torch.arange(6)%3, nn.Sequential(copy.deepcopy(layer), nn.Flatten(),
        nn.LazyLinear(3)).double()
    model(x)
    against_oracles(lambda: copy.deepcopy(model), x, y, names=ORACLES)


PADDED = [(nn.Conv1d, (9,), mode) for mode in ("replicate", "circular", "reflect")] + [(nn.Conv2d,
    (7, 7), mode) for mode in ("replicate", "circular", "reflect")] + [(nn.Conv3d, (5, 5, 5),
        "replicate")]


@pytest.mark.parametrize("kind, shape, mode", PADDED, ids=lambda value: getattr(value, "__name__",
    None))
def test_a_padding_that_is_not_zeros_is_clipped_rightly(kind, shape, mode):
    def padded():
        torch.manual_seed(0)
        return nn.Sequential(kind(2, 3, 3, padding=1, padding_mode=mode), nn.Flatten(),
                             nn.LazyLinear(5))
    x, y, model = torch.randn(1, 2, *shape, generator=seeded()), torch.tensor([1]), padded()
    model(x)
    step = step_for(model, clip_rule=Flat(max_grad_norm=1e-3), expected_batch_size=1)
    true = torch.cat([g.flatten() for g in torch.autograd.grad(LOSS(model(x), y),
        list(model.parameters()))])
    step(LOSS, x, y)
    assert difference(gradient(step), 1e-3*true/true.norm()) < 1e-5


def test_a_layer_norm_without_bias_is_clipped_rightly():
    def normed():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, 5))
    x, y, model = torch.randn(1, 4, generator=seeded()), torch.tensor([1]), normed()
    true = torch.cat([g.flatten() for g in torch.autograd.grad(LOSS(model(x), y),
        list(model.parameters()))])
    step = step_for(model, clip_rule=Flat(max_grad_norm=1e-3), expected_batch_size=1)
    step(LOSS, x, y)
    assert difference(gradient(step), 1e-3*true/true.norm()) < 1e-5


LAYOUTS = {"channels_last": lambda x: x.to(memory_format=torch.channels_last),
           "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_takes_any_memory_format(layout):
    x, y = batch(digits_cnn, 6, dtype=torch.float64)
    reference, model = step_for(network(digits_cnn, torch.float64)), network(digits_cnn,
        torch.float64)
    step = step_for(model.to(memory_format=torch.channels_last) if layout == "channels_last"
                    else model)
    a, b = step(LOSS, LAYOUTS[layout](x), y), reference(LOSS, x, y)
    assert difference(gradient(step), gradient(reference)) < 1e-9
    assert difference(a.nonprivate_norms, b.nonprivate_norms) < 1e-9


@pytest.mark.slow
def test_secure_noise_is_no_slower():
    "Than seeded noise. Which library draws faster depends on the processor; see the noise page."
    # as many values as the MNIST CNN has weights
    sources, buffer, times = (GaussianNoise(secure=True),
                              GaussianNoise(generator=seeded())), torch.empty(431_080), ([], [])
    for k in range(200):
        for i in ((0, 1), (1, 0))[k % 2]:
            start = time.process_time()
            sources[i].fill_(buffer, 1.)
            times[i].append(time.process_time() - start)
    # a tenth for the last cell and a busy machine
    assert np.median(times[0]) <= 1.1*np.median(times[1])


@pytest.mark.parametrize("kernel", ["matrices", "grouped", "gram", "gram_product", "opacus"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last],
                         ids=["default", "channels_last"])
def test_every_kernel_gives_the_same_step(kernel, layout):
    x, y = batch(digits_cnn, 6, dtype=torch.float64)
    wanted, _ = opacus_hooks(network(digits_cnn, torch.float64), LOSS, x, y,
                             Flat(max_grad_norm=.5).scale)
    model = network(digits_cnn, torch.float64).to(memory_format=layout)
    step = step_for(model, kernels={name: kernel for name, m in model.named_modules()
                                    if isinstance(m, nn.Conv2d)})
    step(LOSS, x.to(memory_format=layout), y)
    assert difference(gradient(step), wanted/8) < 1e-9


@pytest.mark.parametrize(("kernel", "channels", "groups", "stride"), [(1, 16, 1, 1), (1, 16, 1, 2),
    (1, 16, 2, 2), (1, 4, 1, 1), (3, 16, 1, 1), (3, 16, 2, 2)])
@pytest.mark.parametrize("last", ["neither", "input", "both"])
def test_patches_in_either_layout_of_input_and_weight(last, kernel, channels, groups, stride):
    "A kernel of one position has both layouts at once for any input; a larger one does not."
    torch.manual_seed(0)
    x, y = torch.randn(6, channels, 8, 6, dtype=torch.float64), torch.arange(6)
    model = nn.Sequential(nn.Conv2d(channels, 8, kernel, stride=stride, groups=groups), nn.Tanh(),
                          nn.Flatten(), nn.LazyLinear(10)).double()
    model(x)
    wanted, _ = opacus_hooks(copy.deepcopy(model), LOSS, x, y, Flat(max_grad_norm=.5).scale)
    step = step_for(model.to(memory_format=torch.channels_last) if last == "both" else model,
                    kernels={"0": "matrices"})
    step(LOSS, x if last == "neither" else x.to(memory_format=torch.channels_last), y)
    assert difference(gradient(step), wanted/8) < 1e-12


def test_pinned_kernels_repeat_to_the_bit():
    x, y = batch(mnist_cnn, 16)
    first = step_for(network(mnist_cnn), generator=seeded(), noise_multiplier=1.)
    again = None
    for _ in range(3): first(LOSS, x, y)
    for _ in range(2):
        step = step_for(network(mnist_cnn), generator=seeded(), noise_multiplier=1.,
                        kernels=first.kernels)
        for _ in range(3): step(LOSS, x, y)
        assert step.kernels == first.kernels
        assert again is None or torch.equal(gradient(step), again)
        again = gradient(step)
    assert torch.equal(again, gradient(first))


def test_noise_has_the_scheduled_scale_step_by_step():
    "With the exact scaled sum known, what is left is noise at that step's scale and no other."
    x, y = batch(digits_cnn, 6, dtype=torch.float64)
    rule = AutoS(max_grad_norm=.7)
    exact = step_for(network(digits_cnn, torch.float64), clip_rule=rule)
    step = step_for(network(digits_cnn, torch.float64), clip_rule=rule, generator=seeded(4))
    for sigma in (3., 1.5, .75):
        exact.model.load_state_dict(step.model.state_dict())
        exact(LOSS, x, y)
        report = step(LOSS, x, y, noise_multiplier=sigma)
        noise = (gradient(step)-gradient(exact)).numpy()
        scale = sigma*.7/8
        assert report.noise_multiplier == sigma and math.isclose(report.noise_std, scale)
        assert stats.kstest(noise, "norm", args=(0, scale)).pvalue > 1e-3
        for wrong in (2/3, 3/2):
            assert stats.kstest(noise, "norm", args=(0, wrong*scale)).pvalue < 1e-9


def test_secure_noise_is_gaussian_and_independent_between_draws():
    source = GaussianNoise(secure=True)
    first, second = (source.fill_(torch.empty(300_001), 2.).numpy() for _ in range(2))
    for z in (first, second):
        assert stats.kstest(z, "norm", args=(0, 2)).pvalue > 1e-4
        for wrong in (2/3, 3/2): assert stats.kstest(z, "norm", args=(0, 2*wrong)).pvalue < 1e-12
        np.testing.assert_allclose(stats.kurtosis(z.astype(float)), 0, atol=.05)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5/math.sqrt(len(first))
    half = len(first)//2
    assert abs(np.corrcoef(np.abs(first[:half]), np.abs(first[half:2*half]))[0, 1]) < 5/math.sqrt(
        half)


def test_secure_step_never_repeats():
    x, y = batch(digits_cnn, 4)
    found = []
    for _ in range(2):
        step = step_for(network(digits_cnn), secure_noise=True, noise_multiplier=1.)
        step(LOSS, x, y)
        found.append(gradient(step))
    assert not torch.equal(*found)


def test_empty_batch_is_a_step_with_noise():
    x, y = batch(digits_cnn, 4)
    model = network(digits_cnn)
    before = copy.deepcopy(model.state_dict())
    step = step_for(model, generator=seeded(), noise_multiplier=1.)
    report = step(LOSS, x[:0], y[:0])
    assert report.nonprivate_batch_size == 0 and math.isnan(report.nonprivate_loss)
    assert stats.kstest(gradient(step).numpy(), "norm", args=(0, .5/8)).pvalue > 1e-3
    assert all(not torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_samples_that_are_not_finite_are_left_out_and_counted(bad):
    x, y = batch(mnist_cnn, 5)
    clean = step_for(network(mnist_cnn))
    clean(LOSS, x, y)
    step = step_for(network(mnist_cnn))
    report = step(LOSS, torch.cat([x[:2], x[:1]*0+bad, x[2:]]), torch.cat([y[:2], y[:1], y[2:]]))
    assert report.nonprivate_not_finite == 1 and report.nonprivate_scales[2] == 0
    assert difference(gradient(step), gradient(clean)) < 1e-5


def test_all_samples_not_finite_is_noise_alone():
    x, y = batch(digits_cnn, 3)
    step = step_for(network(digits_cnn), generator=seeded(), noise_multiplier=1.)
    report = step(LOSS, x*math.nan, y)
    assert report.nonprivate_not_finite == 3
    assert torch.equal(gradient(step), GaussianNoise(generator=seeded()).fill_(
        torch.empty(len(gradient(step))), .5/8))


class Remembers(nn.Module):
    "Keeps a running mean of its input, without noise."
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(64))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        self.seen.add_(x.flatten(1).mean(0))
        return self.head(x.flatten(1))


def test_a_changed_buffer_is_named_and_put_back():
    model = network(Remembers)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError,
                       match="no buffer may change in a private step, got a change of 'seen'"):
        step_for(model)(LOSS, *batch(digits_cnn, 4))
    for name, value in model.state_dict().items(): assert torch.equal(value, weights[name])


def test_pieces_are_the_whole():
    x, y = batch(digits_cnn, 11, dtype=torch.float64)
    whole, pieces = (step_for(network(digits_cnn, torch.float64), generator=seeded(),
                              noise_multiplier=1.,
        max_physical_batch_size=size) for size in (None, 4))
    reports = [step(LOSS, x, y) for step in (whole, pieces)]
    assert difference(gradient(pieces), gradient(whole)) < 1e-12
    torch.testing.assert_close(reports[0].nonprivate_norms, reports[1].nonprivate_norms)


def test_an_interrupted_step_leaves_nothing_behind():
    x, y = batch(digits_cnn, 6, dtype=torch.float64)
    step, clean = (step_for(network(digits_cnn, torch.float64)) for _ in range(2))
    step.begin()
    step.accumulate(LOSS, x, y)
    for s in (step, clean): s(LOSS, x, y)
    assert difference(gradient(step), gradient(clean)) < 1e-12


def test_optimizer_may_set_gradients_to_none():
    x, y = batch(digits_cnn, 6)
    a, b = (step_for(network(digits_cnn), generator=seeded(), noise_multiplier=1.,
                     kernels={"0": "matrices", "3": "matrices"}) for _ in range(2))
    for _ in range(2):
        for step in (a, b): step(LOSS, x, y)
        b.optimizer.zero_grad(set_to_none=True)
    for p, q in zip(a.model.parameters(), b.model.parameters()): assert torch.equal(p, q)


def test_rules_with_counts_are_renewed():
    x, y = batch(digits_cnn, 6)
    step = step_for(network(digits_cnn), clip_rule=GlobalAdapt(), generator=seeded())
    step(LOSS, x, y)
    first = step.clip_rule.strict_max_grad_norm
    step(LOSS, x[:0], y[:0])
    assert len({10., first, step.clip_rule.strict_max_grad_norm}) == 3
    step = step_for(network(digits_cnn), clip_rule=GroupAdaptive(num_groups=2), generator=seeded(),
                    noise_multiplier=1.)
    report = step(LOSS, x, y, groups=y%2)
    assert report.sensitivity == step.clip_rule.sensitivity != 2.
    step(LOSS, x[:0], y[:0], groups=y[:0])


def test_a_rule_that_counts_first_takes_pieces():
    x, y = batch(digits_cnn, 7, dtype=torch.float64)
    x[2] = math.nan
    rule = GroupAdaptive(num_groups=10, count_noise=1.)
    whole, pieces = (step_for(network(digits_cnn, torch.float64), clip_rule=rule,
                              generator=seeded(), noise_multiplier=1.,
                              max_physical_batch_size=size) for size in (None, 3))
    for _ in range(2): a, b = (step(LOSS, x, y, groups=y) for step in (whole, pieces))
    assert whole.clip_rule == pieces.clip_rule != rule
    assert a.nonprivate_not_finite == b.nonprivate_not_finite == 1
    assert difference(gradient(pieces), gradient(whole)) < 1e-9 and a.noise_std == b.noise_std
    pieces.begin(); pieces.accumulate(LOSS, x[:3], y[:3], groups=y[:3])
    with pytest.raises(ValueError,
                       match="must see the logical batch in one call, got a second piece"):
        pieces.accumulate(LOSS, x[3:], y[3:], groups=y[3:])


@pytest.mark.parametrize("rule", [GlobalAdapt(count_noise=7.), GroupAdaptive(num_groups=2,
    count_noise=7., group_bounds=(3., 3.))], ids=["after", "before"])
def test_secure_counts_draw_from_the_secure_source(rule, monkeypatch):
    stds, fill = [], GaussianNoise.fill_
    def counted(self, out, std):
        assert self.secure
        stds.append(std)
        return fill(self, out, std)
    def refused(*args, **options): raise AssertionError("torch's generator was asked for noise")
    x, y = batch(digits_cnn, 6)
    step = step_for(network(digits_cnn), clip_rule=rule, secure_noise=True, noise_multiplier=1.)
    monkeypatch.setattr(GaussianNoise, "fill_", counted)
    monkeypatch.setattr(torch, "randn", refused)
    report = step(LOSS, x, y, groups=y%2)
    # DP-F's bounds have mean 2 after any counts, or are all 1
    assert set(stds) == {7., report.noise_std} and step.clip_rule != rule


@pytest.mark.parametrize("loss", [LOSS, nn.functional.cross_entropy,
                                  nn.CrossEntropyLoss(reduction="sum")], ids=["mean", "function",
                                      "sum"])
def test_no_samples_have_no_losses(loss):
    assert per_sample_losses(loss, torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape == (
        0,)
    assert per_sample_losses(loss, torch.zeros(0, 3, 4),
                             torch.zeros(0, 4, dtype=torch.long)).shape == (0,)


class Words(nn.Module):
    "Predicts the next word from the mean of the words before it, by the weights of the embedding."
    def __init__(self, is_module):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 7,
            bias=False) if is_module else None
        if is_module: self.head.weight = self.words.weight

    def forward(self, words):
        mean = torch.tanh(self.words(words).mean(1))
        return self.head(mean) if self.head else nn.functional.linear(mean, self.words.weight)


def test_a_weight_in_two_modules_is_right_and_one_in_a_function_is_refused():
    words, y = torch.randint(7, (6, 4), generator=seeded()), torch.arange(6)%7
    found = step_for(network(lambda: Words(True), torch.float64), clip_rule=AutoS())
    found(LOSS, words, y)
    weight = network(lambda: Words(True), torch.float64).words.weight.detach()
    def loss(weight, words, y):
        return LOSS((torch.tanh(weight[words].mean(0))@weight.T)[None], y[None])
    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, words, y).flatten(1)
    expected = (AutoS().scale(rows.norm(dim=1))[:, None]*rows).sum(0)/8
    assert difference(gradient(found), expected) < 1e-9
    model = network(lambda: Words(False))
    with pytest.raises(ValueError, match="every parameter must be used by its own layer alone, got "
                       "'words.weight' in a function outside of it"):
        step_for(model)(LOSS, words, y)
    assert model.words.weight.requires_grad and not model._forward_hooks
    assert not model.words._forward_pre_hooks


def test_a_weight_in_the_loss_is_refused_at_any_step():
    model, (x, y), penalty = network(digits_cnn), batch(digits_cnn, 4), 0.
    weight = next(model.parameters())
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none") + (
            penalty*weight.square().sum() if penalty else 0)
    step = step_for(model, generator=seeded(), noise_multiplier=1.)
    step(loss, x, y)
    before, penalty = copy.deepcopy(model.state_dict()), 1e3
    with pytest.raises(ValueError, match="the loss must reach parameters through the model's "
                       "layers alone, got a gradient of 1 parameters past them"):
        step(loss, x, y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    penalty = 0.
    step(loss, x, y) # and the next one is a step again
    assert gradient(step).norm() < 1e3


# one counts after it scales, one before
COUNTING = [GlobalAdapt(strict_max_grad_norm=3.), GroupAdaptive(num_groups=10, count_noise=1.)]


def share(rank, world, rule, out):
    "One of the processes of the test below."
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.meet", rank=rank, world_size=world)
    x, y = batch(digits_cnn, 8, dtype=torch.float64)
    torch.manual_seed(rank)  # DistributedDataParallel starts from rank 0's weights
    model = DistributedDataParallel(network(digits_cnn, torch.float64))
    step = step_for(model, clip_rule=rule, generator=seeded(), noise_multiplier=1.,
                    max_physical_batch_size=4)
    for turn in range(3):
        mine = slice(0, 6) if rank == 0 else slice(6, 8)
        if turn == 1: mine = slice(0, 8) if rank == 0 else slice(0, 0)  # an empty share
        step(LOSS, x[mine], y[mine], groups=y[mine] if rule.needs_groups else None)
    if rank == 0: torch.save((gradient(step), asdict(step.clip_rule)), out)
    else:
        torch.save((torch.cat([p.detach().flatten() for p in model.module.parameters()]),
                    asdict(step.clip_rule)), f"{out}.1")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("rule", COUNTING, ids=["after", "before"])
def test_two_processes_take_the_step_of_one(rule, tmp_path, processes):
    mp.start_processes(share, args=(2, rule, str(tmp_path/"out")), nprocs=2,
                       start_method=processes.get_start_method())
    x, y = batch(digits_cnn, 8, dtype=torch.float64)
    alone = step_for(network(digits_cnn, torch.float64), clip_rule=rule, generator=seeded(),
                     noise_multiplier=1.)
    for _ in range(3): alone(LOSS, x, y, groups=y if rule.needs_groups else None)
    found, there = torch.load(tmp_path/"out", weights_only=True)
    assert difference(found, gradient(alone)) < 1e-9
    assert there == asdict(alone.clip_rule) != asdict(rule)
    other, second = torch.load(f"{tmp_path/'out'}.1", weights_only=True)
    assert second == there
    weights = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
    assert difference(other, weights) < 1e-9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
def test_cuda_takes_the_step_of_the_cpu():
    x, y = batch(digits_cnn, 6, dtype=torch.float64)
    here, there = (step_for(network(digits_cnn, torch.float64).to(d), generator=seeded(),
                            noise_multiplier=1.) for d in ("cpu", "cuda"))
    here(LOSS, x, y)
    there(LOSS, x.cuda(), y.cuda())
    assert difference(gradient(there).cpu(), gradient(here)) < 1e-9


class Pulled(nn.Module):
    "A layer whose output gradients are `way`, one for each output."
    def __init__(self, layer, way): super().__init__(); self.layer, self.way = layer, way
    def forward(self, x): return (self.layer(x)*self.way).flatten(1).sum(1)


def cancelling(kind, seed):
    "A layer, its input shape, and output gradients that nearly cancel over positions."
    layer, shape, across = (nn.Linear(6, 4), (20, 6), 1) if kind == "linear" else (nn.Conv2d(2, 3,
        3), (2, 7, 7), (2, 3))
    way = torch.randn(layer(torch.zeros(1, *shape)).shape, generator=seeded(seed))
    return layer, shape, way - way.mean(across, keepdim=True)


CONVOLUTIONS = ("matrices", "grouped", "gram", "gram_product")
KINDS = [("linear", kernel) for kernel in ("matrices", "gram")] + [("convolution", kernel)
    for kernel in CONVOLUTIONS]


@pytest.mark.parametrize("kind, kernel", KINDS)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(mean=st.sampled_from([0., 1., 30., 1e3]), spread=st.floats(1e-4, 1e4),
       pull=st.floats(1e-22, 1e4), rule=st.sampled_from([Flat(), AutoS(stability=1e-29), AutoS()]),
       seed=st.integers(0, 10**6))
def test_no_gradient_passes_its_sensitivity(kind, kernel, mean, spread, pull, rule, seed):
    layer, shape, way = cancelling(kind, seed)
    step = step_for(Pulled(layer, pull*way), kernels={"layer": kernel}, clip_rule=rule,
                    expected_batch_size=1)
    step(lambda outputs, targets: outputs,
         spread*(mean + torch.randn(1, *shape, generator=seeded(seed + 1))), torch.zeros(1))
    assert gradient(step).double().norm() <= rule.sensitivity*(1 + 1e-5)


RULES = [Flat(), AutoS(), PSAC(), Global(), GlobalAdapt(), GlobalAdaptV2(),
         GroupAdaptive(num_groups=2)]


@settings(derandomize=True, deadline=None, max_examples=120)
@given(rule=st.sampled_from(RULES), bound=st.floats(1e-6, 1e6),
       sizes=st.lists(st.sampled_from([0., 1e-30, 1e-3, 1., 1e3, 1e15, 1e20, 3e38, math.inf,
                                       -math.inf, math.nan]), min_size=1, max_size=3))
def test_no_sample_passes_its_sensitivity_whatever_the_rule(rule, bound, sizes):
    rule, layer = replace(rule, max_grad_norm=bound), nn.Linear(3, 1, bias=False)
    step = step_for(layer, clip_rule=rule, expected_batch_size=1, generator=seeded())
    x = torch.ones(len(sizes), 3)*torch.tensor(sizes)[:, None]
    step(lambda outputs, targets: outputs[:, 0], x, torch.zeros(len(x)),
         groups=torch.arange(len(x))%2 if rule.needs_groups else None)
    # DP-F scales by the bounds that it has just counted
    bound = (rule if rule.counts_first is False else step.clip_rule).sensitivity
    assert gradient(step).double().norm() <= sum(map(math.isfinite, sizes))*bound*(1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["mnist-64", "mnist-256"])
def test_the_step_needs_little_more_memory_than_an_ordinary_one(root, row):
    def peak(variant):
        return json.loads(subprocess.run([sys.executable, root/"tests"/"bench"/"private_step.py",
            "--peak", f"{row}:{variant}"], check=True, capture_output=True,
            text=True).stdout.splitlines()[-1])["peak_mb"]
    assert peak("book") <= 1.3*peak("ordinary")


@pytest.fixture
def small_pieces(monkeypatch):
    "Late gradients get no freed memory, so that even a small batch is formed in several pieces."
    monkeypatch.setattr(book_keeping, "pieces", lambda parts, batch,
                        freed=0: per_sample_norms.pieces(parts, batch))


class Watched(Flat):
    "A flat rule that notes how many samples it is asked about at a time."
    def scale(self, norms):
        SEEN.append(len(norms))
        return super().scale(norms)


SEEN = []


@pytest.mark.parametrize("kernel", ["matrices", "grouped"])
def test_late_gradients_are_the_same_step(kernel, small_pieces):
    "A few samples at a time, one of them not finite and one much brighter, against a loop of one."
    x, y = batch(digits_cnn, 11, dtype=torch.float64)
    x[4], x[6] = math.nan, 30*x[6]
    kernels = {"0": kernel, "3": kernel}
    late = step_for(network(digits_cnn, torch.float64), clip_rule=Watched(max_grad_norm=.5),
                    kernels=kernels)
    SEEN.clear()
    a = late(LOSS, x, y)
    assert sum(SEEN) == 11 and len(SEEN) > 2
    total, norms = one_by_one(network(digits_cnn, torch.float64), LOSS, x, y,
                              Flat(max_grad_norm=.5).scale)
    assert difference(gradient(late), total/8) < 1e-9 and a.nonprivate_not_finite == 1
    good = a.nonprivate_norms.isfinite()
    assert difference(a.nonprivate_norms[good], norms[good]) < 1e-9
    assert torch.equal(a.nonprivate_scales[~good], torch.zeros(1, dtype=torch.float64))


def test_gradients_that_a_cache_holds_are_formed_at_once():
    step = step_for(network(digits_cnn), clip_rule=Watched(max_grad_norm=.5),
                    kernels={"0": "matrices", "3": "matrices"})
    SEEN.clear()
    step(LOSS, *batch(digits_cnn, 11))
    # Two alone, to see that the rule treats them as in the batch
    assert SEEN[0] == 11 and SEEN[1:] == [1, 1]


# Rules that are not what they promise

class Negative(ClipRule):
    def scale(self, norms, groups=None): return torch.full_like(norms, -1e6)


class NotANumber(ClipRule):
    def scale(self, norms, groups=None): return torch.full_like(norms, math.nan)


class ByTheLargest(ClipRule):
    def scale(self, norms, groups=None): return torch.ones_like(norms)/norms.max()


@pytest.mark.parametrize("rule", [Negative(), NotANumber()])
def test_what_a_rule_must_not_say_is_a_scale_of_zero(rule):
    step = step_for(network(digits_cnn), clip_rule=rule)
    report = step(LOSS, *batch(digits_cnn, 5))
    assert torch.equal(report.nonprivate_scales, torch.zeros(5))
    assert torch.equal(gradient(step), torch.zeros_like(gradient(step)))


def test_a_rule_that_lets_samples_meet_is_refused():
    step = step_for(network(digits_cnn), clip_rule=ByTheLargest())
    with pytest.raises(ValueError,
                       match="clip_rule must scale a sample by its own norm alone, got .* from "
                       "ByTheLargest"):
        step(LOSS, *batch(digits_cnn, 5))


def test_a_rule_with_groups_sees_each_sample_with_its_own(small_pieces):
    "Late gradients come a few at a time; DP-F takes all to count, then a few at a time."
    x, y = batch(digits_cnn, 11, dtype=torch.float64)
    rule = GroupAdaptive(num_groups=10, count_noise=1., group_bounds=tuple(.1 + .1*k
        for k in range(10)))
    book, pieces = (step_for(network(digits_cnn, torch.float64), clip_rule=rule, generator=seeded(),
                             kernels={"0": "matrices", "3": "matrices"}, **more)
                             for more in ({}, dict(max_physical_batch_size=6)))
    for step in (book, pieces): step(LOSS, x, y, groups=y)
    total, _ = one_by_one(network(digits_cnn, torch.float64), LOSS, x, y, book.clip_rule.scale,
                          groups=y)
    for step in (book, pieces):
        assert difference(gradient(step), total/8) < 1e-9
        assert step.clip_rule == book.clip_rule != rule


def test_late_gradients_never_need_more_room_than_the_backward_pass():
    late = per_sample_norms.LatePart("weight", 1000, (torch.zeros(64, 30), torch.zeros(64, 20)),
                                     None)
    for freed in (0, 3_200, 20_000, 64_000):
        at = per_sample_norms.pieces([late], 64, freed)
        assert [i for s in at for i in range(64)[s]] == list(range(64))
        assert max(len(range(64)[s]) for s in at)*1000 <= max(freed, 1000)


class Meeting(nn.Module):
    "Two layers with a function between them that may look at the whole batch."
    def __init__(self, f):
        super().__init__()
        self.first, self.f, self.last = nn.Linear(6, 6), f, nn.Linear(6, 3)
    def forward(self, x): return self.last(self.f(self.first(x)))


MEETINGS = dict(mean=lambda h: h-h.mean(0), scale=lambda h: h/h.abs().mean(),
                attention=lambda h: (h@h.T/100).softmax(1)@h, turned=lambda h: h.tanh().flip(0),
                before=lambda h: h.cumsum(0), behind=lambda h: h.flip(0).cumsum(0).flip(0))


@pytest.mark.parametrize("f", MEETINGS.values(), ids=MEETINGS)
def test_samples_that_meet_are_refused(f):
    x, y = torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    model = network(lambda: Meeting(f))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"):
        step_for(model)(LOSS, x, y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    apart = step_for(network(lambda: Meeting(torch.tanh)))
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"):
        apart(lambda o, t: nn.functional.cross_entropy(o, t,
            reduction="none")*o.detach().abs().mean() + o.sum(), x, y)


def test_a_sample_that_is_not_finite_meets_no_other():
    x, y = torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    x[1] = math.nan
    assert step_for(network(lambda: Meeting(torch.tanh)))(LOSS, x, y).nonprivate_not_finite == 1


class Twice(nn.Module):
    "A weight that is used by its layer and, where `past`, by a function too."
    past = True
    def __init__(self): super().__init__(); self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(nn.functional.linear(h, self.first.weight) if self.past else h)


def penalised(model, size):
    "A loss with a penalty on the weights, the same for every sample."
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets,
            reduction="none") + size*model.first.weight.square().sum()
    return loss


def test_uses_past_the_layer_are_refused_from_whatever_step_they_begin():
    x, y = torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    words = "every parameter must be used by its own layer alone"
    for steps in (0, 1, 2):
        model = network(Twice)
        model.past, step = False, step_for(model)
        for _ in range(steps): step(LOSS, x, y)
        model.past = True
        with pytest.raises(ValueError, match=words): step(LOSS, x, y)
    model = network(Twice)
    model.past = False
    with pytest.raises(ValueError, match="the loss must reach"):
        step_for(model)(penalised(model, 10.), x, y)


class Scaled(nn.Linear):
    "A linear layer with a further argument."
    def forward(self, x, factor=None, scale=None):
        return super().forward(x)*(1 if factor is None else factor)*(1 if scale is None else scale)


@pytest.mark.parametrize("call", [lambda layer, x: layer(x, 2.), lambda layer,
                                  x: layer(x, scale=2.), lambda layer, x: layer(x=x)],
                                  ids=["position", "name", "input"])
def test_layers_may_have_arguments_beside_their_input(call):
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.layer = Scaled(6, 3)
        def forward(self, x): return call(self.layer, x)
    model, x, y = network(Net), torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    x = x.to(next(model.parameters()))
    true = [torch.cat([g.flatten() for g in torch.autograd.grad(LOSS(model(a[None]), b[None]),
        list(model.parameters()))]).norm() for a, b in zip(x, y)]
    torch.testing.assert_close(step_for(model)(LOSS, x, y).nonprivate_norms, torch.stack(true),
                               rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    "Two layers of which a batch reaches one."
    use = 0
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    def forward(self, x): return self.layers[self.use](x)


def test_a_layer_that_a_batch_does_not_reach_has_no_gradient():
    x, y = torch.randn(8, 6, dtype=torch.float64, generator=seeded()), torch.arange(8)%3
    step = step_for(network(Branches, torch.float64))
    for use in (0, 1):
        alone = step_for(network(lambda: nn.Linear(6, 3), torch.float64))
        alone.model.load_state_dict(step.model.layers[use].state_dict())
        step.model.use = use
        found = step(LOSS, x, y)
        assert difference(found.nonprivate_norms, alone(LOSS, x, y).nonprivate_norms) < 1e-9
        assert difference(gradient(step).view(2, -1)[use], gradient(alone)) < 1e-9
        assert not gradient(step).view(2, -1)[1-use].any()


def test_autocast_is_refused():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError,
            match="the forward pass must run in the parameters' own precision, got autocast"):
        step_for(network(digits_cnn))(LOSS, *batch(digits_cnn, 4))


def test_norms_over_positions_are_found_where_terms_cancel():
    "Opacus's own Gram matrices give zero for some of these."
    way = torch.randn(64, 4, generator=seeded())
    x = 1e3 + .01*torch.randn(32, 64, 8, generator=seeded(1))
    step = step_for(Pulled(nn.Linear(8, 4, bias=False), way-way.mean(0)))
    found = step(lambda outputs, targets: outputs, x, torch.zeros(32)).nonprivate_norms.double()
    true = torch.bmm((way-way.mean(0)).double().T.expand(32, -1, -1), x.double()).flatten(1).norm(
        dim=1)
    assert (found >= .99*true).all()


def test_a_look_leaves_the_step_as_it_is(monkeypatch):
    "Dropout and noise draw what they would have drawn."
    def step():
        return step_for(network(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(.5),
            nn.Linear(64, 10))), noise_multiplier=1., generator=seeded())
    x, y = batch(digits_cnn, 8)
    looked, blind = step(), step()
    for each, looks in ((looked, lambda passes: True), (blind, lambda passes: False)):
        monkeypatch.setattr(spot_checks, "is_power_or_zero", looks)
        torch.manual_seed(3)
        for _ in range(3): each(LOSS, x, y)
    assert torch.equal(gradient(looked), gradient(blind))


def test_a_kernel_for_vectors_takes_positions_too():
    step = step_for(network(lambda: nn.Linear(6, 3), torch.float64), clip_rule=AutoS())
    step(LOSS, torch.randn(8, 6, dtype=torch.float64, generator=seeded()), torch.arange(8)%3)
    x = torch.randn(8, 5, 6, dtype=torch.float64, generator=seeded())
    step(lambda outputs, targets: outputs.square().flatten(1).sum(1), x, torch.zeros(8))
    assert step.kernels == {"": "rank_one"} and gradient(step).isfinite().all()
    again = step_for(copy.deepcopy(step.model), clip_rule=AutoS(), kernels={"": "rank_one"})
    def squared(outputs, targets): return outputs.square().flatten(1).sum(1)
    total, _ = opacus_hooks(copy.deepcopy(step.model), squared, x, torch.zeros(8), AutoS().scale)
    again(squared, x, torch.zeros(8))
    assert difference(gradient(again), total/8) < 1e-9


def test_a_layer_without_a_formula_may_change_between_steps():
    "Opacus keeps a copy of such a layer."
    class Tempered(nn.Module):
        t = 1.
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 3, dtype=torch.float64))
        def forward(self, x): return x@self.weight*self.t
    x, y, model = torch.randn(8, 6, dtype=torch.float64, generator=seeded()), torch.arange(
        8)%3, Tempered()
    step = step_for(model, clip_rule=Flat(max_grad_norm=1e9))
    for _ in range(4): step(LOSS, x, y)
    model.t = 10.
    found, = torch.autograd.grad(8*LOSS(model(x), y), list(model.parameters()))
    step(LOSS, x, y)
    assert difference(8*gradient(step), found.flatten()) < 1e-9


def test_what_a_layer_has_read_may_not_change_before_the_sum():
    model = nn.Linear(3, 2)
    book, x = book_keeping.BookKeeping(model), torch.ones(4, 3)
    with book.recording(): outputs = model(x)
    outputs.sum().backward()
    x.mul_(100)
    with pytest.raises(ValueError, match="the input of layer '' and its output's gradient must not "
                       "be changed in place before the step is over"):
        next(book.samples())
    assert not book.flat.any()


def test_a_step_that_failed_half_way_cannot_go_on(small_pieces, monkeypatch):
    x, y = batch(digits_cnn, 11, dtype=torch.float64)
    step = step_for(network(digits_cnn, torch.float64), kernels={"0": "matrices", "3": "matrices"})
    form, calls = per_sample_norms.weight_matrices, []
    def fails(*args):
        calls.append(args)
        if len(calls) == 4: raise MemoryError("no room for the next piece")
        return form(*args)
    monkeypatch.setattr(per_sample_norms, "weight_matrices", fails)
    step.begin()
    with pytest.raises(MemoryError): step.accumulate(LOSS, x, y)
    for go_on in (step.finish, lambda: step.accumulate(LOSS, x, y)):
        with pytest.raises(ValueError, match="begin must be called before"): go_on()
    clean = step_for(network(digits_cnn, torch.float64), kernels={"0": "matrices", "3": "matrices"})
    monkeypatch.undo()
    for s in (step, clean): s(LOSS, x, y)
    assert difference(gradient(step), gradient(clean)) < 1e-12


def test_groups_must_fit_the_batch():
    x, y = batch(digits_cnn, 6)
    step = step_for(network(digits_cnn), clip_rule=GroupAdaptive(num_groups=10), generator=seeded())
    with pytest.raises(ValueError,
                       match="groups must have one label per sample, got 7 labels for 6 samples"):
        step(LOSS, x, y, groups=torch.zeros(7, dtype=torch.long))


@pytest.mark.parametrize("size", [1e-22, 1e-25])
@pytest.mark.parametrize("positions", [False, True])
def test_vanished_gradients_are_not_amplified(size, positions):
    "Single-precision squares vanish below 1e-22; a zero norm would get c0/z, of any size."
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = [p.detach().clone() for p in model.parameters()]
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=1.),
                       clip_rule=GlobalAdapt(max_grad_norm=1., strict_max_grad_norm=1e-28),
                       expected_batch_size=1, noise_multiplier=0.)
    x = torch.randn(1, *[5]*positions, 3, generator=torch.Generator().manual_seed(0))
    step(lambda outputs, targets: size*outputs.flatten(1).sum(1), x,
         torch.zeros(1, dtype=torch.long))
    moved = math.sqrt(sum((p.detach().double() - b).square().sum().item() for p,
                          b in zip(model.parameters(), before)))
    assert moved <= 1.001


def test_vanished_inputs_are_not_amplified():
    "Nor where two small factors are lost in their product alone."
    step = step_for(nn.Linear(4, 3, bias=False), clip_rule=AutoS(stability=1e-29),
                    expected_batch_size=1)
    step(lambda outputs, targets: 1e-14*outputs.sum(1), torch.full((1, 4), 1e-10), torch.zeros(1))
    assert gradient(step).norm() <= 1.001


class Weighted(nn.Module):
    "A layer and a public table, which has no rows of samples."
    def __init__(self): super().__init__(); self.layer = nn.Linear(4, 3)
    def forward(self, x, table): return self.layer(x)*table.sum()


def test_a_public_table_stays_whole():
    x, y, table, model = torch.randn(5, 4, generator=seeded()), torch.arange(5)%3, torch.arange(
        7.), Weighted()
    whole, pieces = (step_for(copy.deepcopy(model), **options)
                     for options in ({}, {"max_physical_batch_size": 2}))
    for step in (whole, pieces): step(LOSS, (x, table), y)
    for i in range(5): # alone
        model.zero_grad()
        LOSS(model(x[i:i+1], table), y[i:i+1]).backward()
        alone = torch.cat([p.grad.flatten() for p in model.parameters()])
        found = step_for(copy.deepcopy(model))(LOSS, (x[i:i+1], table), y[i:i+1]).nonprivate_norms
        assert found.item() == pytest.approx(alone.norm().item(), rel=1e-5)
    assert difference(gradient(pieces), gradient(whole)) < 1e-6
    with pytest.raises(ValueError, match="batch"): whole(LOSS, (x, table), y[:3])


@pytest.mark.parametrize("options, word",
                         [({"max_physical_batch_size": -1}, "max_physical_batch_size must be"),
                          ({"expected_batch_size": 2.5},
                           "expected_batch_size must be a whole number"),
                           ({"expected_batch_size": math.inf}, "expected_batch_size must be"),
                           ({"clip_rule": "flat"},
                            "clip_rule must be a ClipRule, got clip_rule='flat'"),
                            ({"generator": 1}, "generator must be a torch.Generator or None, got "
                             "generator=1")])
def test_settings_without_a_meaning_are_refused(options, word):
    with pytest.raises(ValueError, match=word): step_for(nn.Linear(4, 3), **options)


def test_a_kernel_for_one_group_is_not_pinned_on_two():
    with pytest.raises(ValueError, match="got 'gram_product'"):
        step_for(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2)), kernels={"0": "gram_product"})


def test_groups_and_their_bounds_are_legal():
    with pytest.raises(ValueError, match="groups must be whole numbers"):
        GroupAdaptive(num_groups=2).scale(torch.ones(2), torch.tensor([.9, 0.]))
    with pytest.raises(ValueError, match="max_grad_norm must be in"):
        GroupAdaptive(num_groups=2, max_grad_norm=6e29)
    with pytest.raises(ValueError, match="group_bounds must be in"):
        GroupAdaptive(num_groups=2, group_bounds=(1., 1e30))


class Keeper(nn.Module):
    "A buffer that a batch may change in value, shape or kind."
    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 3), change
        self.register_buffer("kept", torch.tensor([math.nan, 1.]))
    def forward(self, x): self.change(self); return self.layer(x)


CHANGES = {"shape": lambda m: setattr(m, "kept", torch.zeros(3)), "kind": lambda m: setattr(m,
    "kept", m.kept.double()), "value": lambda m: m.kept.fill_(2.)}


@pytest.mark.parametrize("kind", [*CHANGES, "none"])
def test_buffers_stay_in_value_shape_and_kind(kind):
    model, x, y = Keeper(CHANGES.get(kind, lambda m: None)), torch.randn(4, 4), torch.arange(4)%3
    if kind == "none": step_for(model)(LOSS, x, y)
    else:
        with pytest.raises(ValueError,
                           match="no buffer may change in a private step, got a change of 'kept'"):
            step_for(model)(LOSS, x, y)
    torch.testing.assert_close(model.kept, torch.tensor([math.nan, 1.]), equal_nan=True)


def test_layer_norm_takes_inputs_in_any_order_of_memory():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm([4, 3]), nn.Linear(12,
                3)
        def forward(self, x):
            return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2).flatten(1))
    x, y = torch.randn(6, 3, 4, generator=seeded(), dtype=torch.float64), torch.arange(6)%3
    against_oracles(lambda: network(Turned, torch.float64), x, y, names=["one_by_one", "hooks"])


@pytest.mark.parametrize("name, value", [("clip_rule", Flat(max_grad_norm=100.)),
    ("expected_batch_size", 1)])
def test_what_the_noise_is_for_stays_until_the_step_is_over(name, value):
    model, x, y = nn.Linear(4, 3), torch.randn(4, 4), torch.arange(4)%3
    step = step_for(model)
    step.begin()
    step.accumulate(LOSS, x[:2], y[:2])
    setattr(step, name, value)
    with pytest.raises(ValueError,
                       match="clip_rule and expected_batch_size must stay from begin to finish"):
        step.accumulate(LOSS, x[2:], y[2:])


def test_group_norm_takes_vectors_in_any_order_of_memory():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)
        def forward(self, x): return self.last(self.norm(self.first(x).T.contiguous().T))
    x, y = torch.randn(6, 4, generator=seeded(), dtype=torch.float64), torch.arange(6)%3
    against_oracles(lambda: network(Turned, torch.float64), x, y, names=["one_by_one", "hooks"])


def test_a_loop_that_seeds_torch_again_draws_no_noise_twice():
    model, empty = nn.Linear(4, 3), (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))
    step, drawn = step_for(model), []
    for _ in range(2):
        torch.manual_seed(7)
        step(LOSS, *empty, noise_multiplier=1.)
        drawn.append(gradient(step))
    assert not torch.equal(*drawn) and drawn[0].norm() > 0


class Viewed(nn.Module):
    "A layer whose output is a view: a part of a larger one, or turned."
    def __init__(self, kind): super().__init__(); self.layer, self.kind = nn.Linear(6, 8), kind
    def forward(self, x):
        y = self.layer(x)
        return y[..., :5] if self.kind == "part" else y.transpose(1,
            2) if self.kind == "turned" else y


class InPlace(nn.Module):
    "Positions, and a change in place of what the layer gave."
    def __init__(self, layer): super().__init__(); self.layer, self.last = layer, nn.LazyLinear(3)
    def forward(self, x): return self.last(self.layer(x).tanh_().flatten(1))


@pytest.mark.parametrize("way", ["step", "loop"])
@pytest.mark.parametrize("kind", ["positions", "instance norm", "part", "turned"])
def test_an_output_that_is_a_view_may_be_changed_in_place(kind, way):
    "A linear layer's output at positions is a view. Three passes are checked, the fourth is not."
    x, y = torch.randn(8, 5, 6, generator=seeded(), dtype=torch.float64), torch.arange(8)%3
    torch.manual_seed(0)
    model = InPlace({"positions": lambda: nn.Linear(6, 8),
                     "instance norm": lambda: nn.InstanceNorm1d(5, affine=True)}.get(kind,
                         lambda: Viewed(kind))()).double()
    LOSS(model(x), y).backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    still, options = torch.optim.SGD(model.parameters(), lr=0.), dict(noise_multiplier=1e-12,
        expected_batch_size=8)
    if way == "step":
        step = PrivateStep(model, still, clip_rule=Flat(max_grad_norm=10.), **options)
        for _ in range(4): step(LOSS, x, y)
    else:
        made, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
            optimizer=still, max_grad_norm=10., data_loader=DataLoader(TensorDataset(x, y),
                batch_size=8), **options)
        for _ in range(4):
            for inputs, targets in loader:
                LOSS(made(inputs), targets).backward()
                optimizer.step()
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), wanted,
                               rtol=1e-6, atol=1e-9)


def test_a_model_may_ask_for_gradients_on_its_way():
    "Hooks of its own while it trains, as for a map of what it looks at."
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        def forward(self, x):
            h = self.first(x).tanh()
            if self.training: h.register_hook(lambda b: None)
            return self.last(h)
    x, y = torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    step = step_for(Mapped())
    for _ in range(4): step(LOSS, x, y)


class OwnScale(Flat):
    def scale(self, norms, groups=None): return torch.full_like(norms, 5.)


class OwnWeight(Flat):
    def weight(self, n, groups=None): return torch.full_like(n, 3.)


class OwnShape(Flat):
    def scale(self, norms, groups=None): return torch.ones(1)


def test_a_rule_of_one_s_own_is_held_to_its_sensitivity():
    x, y = 10*torch.randn(8, 4, generator=seeded()), torch.arange(8)%3
    for rule in (OwnScale(max_grad_norm=.01), OwnWeight(max_grad_norm=.01)):
        report = step_for(nn.Linear(4, 3), clip_rule=rule)(LOSS, x, y)
        assert (report.nonprivate_norms*report.nonprivate_scales).max() <= .01*(1+1e-6)
    with pytest.raises(ValueError, match=r"clip_rule must give one scale a sample, got shape "
                       r"\(1,\) from OwnShape for 8 samples"):
        step_for(nn.Linear(4, 3), clip_rule=OwnShape())(LOSS, x, y)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="optimizer must hold the trainable parameters of module "
                       "and no others, got 2 that it misses and 2 that are not the module's"):
        PrivateStep(nn.Linear(4, 3), torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=.1),
                    clip_rule=Flat(), expected_batch_size=8)


@pytest.mark.parametrize("changed, sentence", [
    (dict(model="m"), "module must be a torch Module, got a str"), (dict(optimizer="sgd"),
        "optimizer must be a torch Optimizer, got a str"),
    (dict(clip_rule="auto_s"), "clip_rule must be a ClipRule, got clip_rule='auto_s'"),
    (dict(noise_multiplier="1"),
     "noise_multiplier must be finite and >= 0, got noise_multiplier='1'"),
    (dict(kernels=["gram"]),
     "kernels must be a dict of layer names and kernels, got kernels=\\['gram'\\]"),
     (dict(model=nn.TransformerEncoderLayer(8, 2)),
      "MultiheadAttention at 'self_attn' computes its projections in one call")])
def test_what_no_step_can_be_made_of_is_said_in_a_sentence(changed, sentence):
    model = changed.pop("model", nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters() if isinstance(model, nn.Module)
                                else [torch.zeros(1)], lr=.1)
    with pytest.raises(ValueError, match=sentence):
        PrivateStep(model, **dict(optimizer=optimizer, clip_rule=Flat(), expected_batch_size=4,
                                  noise_multiplier=1.) | changed)


def test_targets_must_be_a_tensor():
    model = nn.Linear(3, 2)
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1), clip_rule=Flat(),
                       expected_batch_size=4, noise_multiplier=1.)
    with pytest.raises(ValueError,
                       match="targets must be a tensor with the batch in front, got a list"):
        step(nn.CrossEntropyLoss(), torch.randn(4, 3), [0, 1, 0, 1])
