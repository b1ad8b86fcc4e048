"The sanitization layer: bounds, noise and grid of its rows, and the networks around it."
import copy
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import nn

from dp_companion.algorithms.sanitization import (
    SanitizationLayer, freeze_below, funnel, model_report, sanitization_cnn, sanitization_resnet18
)
from dp_companion.budgets.released_rows import RowRelease, row_epsilon
from dp_companion.budgets.schedules import PoissonPlan

quick = settings(derandomize=True, deadline=None, max_examples=60)
PLAN = PoissonPlan(dataset_size=50000, expected_batch_size=250, epochs=100)


def seeded(seed): return torch.Generator().manual_seed(seed)


@quick
@given(st.integers(1, 40), st.floats(1e-3, 1e3), st.sampled_from([0., .3]),
    st.sampled_from(["before", "after"]), st.sampled_from([torch.float16, torch.bfloat16,
    torch.float32]), st.integers(0, 99))
def test_rows_are_bounded_whatever_comes_in(width, clip, dropout, position, dtype, seed):
    wild = (1e3*clip*torch.randn(5, width, generator=seeded(seed))).to(dtype)
    wild[0, 0], wild[1, 0], wild[2, 0] = math.nan, math.inf, -math.inf
    layer = SanitizationLayer(width, clip, 1., dropout, position, seeded(seed))
    assert (layer.eval()(wild).double().abs() <= clip*(1 + torch.finfo(dtype).eps)).all()
    noisy = layer.train()(wild)
    # the same noise and mask
    layer.generator.manual_seed(seed)
    quiet = layer(torch.zeros_like(wild))
    moved = (noisy.double() - quiet.double()).abs().max().item()*(1 - dropout if position == "after"
        else 1)
    # of what rounds the released number
    assert noisy.isfinite().all() and moved <= clip + 8*torch.finfo(dtype).eps*max(
        noisy.double().abs().max().item(), quiet.double().abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [.3, .7, 1.0039])
@pytest.mark.parametrize("rows", ["nonnegative", "symmetric"])
def test_no_precision_lets_an_element_past_the_bound(dtype, clip, rows):
    layer = SanitizationLayer(4, clip, 1e-30, rows=rows) # noise that the grid swallows
    # C as that precision has it, perhaps above C
    most = layer.clipped(torch.full((2, 4), 9., dtype=dtype)).double()
    assert layer.noisy(most).max() <= clip and layer.noisy(-most).min() >= -clip


def test_the_sign_of_a_dropped_element_is_not_released():
    out = SanitizationLayer(50, 1., 1., .5, generator=seeded(0))(torch.randn(200, 50))
    assert (out == 0).any() and not torch.signbit(out[out == 0]).any()


def test_noise_is_what_the_budget_says():
    for p, position in ((0., "after"), (.4, "before"), (.4, "after")):
        layer = SanitizationLayer(64, .25, 2., p, position, seeded(1))
        assert layer.noise_std == pytest.approx(.25*2*math.sqrt(64*(1 - p)))
        out = layer(torch.zeros(5000, 64)).double()
        factor = 1 - p if position == "after" else 1.
        assert out[out != 0].std().item()*factor == pytest.approx(layer.noise_std, rel=.01)
        assert layer.release(7) == RowRelease(width=64, noise_multiplier=2., releases=7, dropout=p,
            dropout_position=position)


def test_state_copies_and_half_precision():
    layer = SanitizationLayer(8, .5, 1., .2, generator=seeded(2))
    layer.clip = .1
    other = SanitizationLayer(8, 3., 1., .2, generator=seeded(2))
    other.load_state_dict(layer.state_dict())
    assert other.clip == .1
    twin = copy.deepcopy(other)
    assert torch.equal(twin(torch.ones(3, 8)), layer(torch.ones(3, 8)))
    assert layer(torch.ones(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16 and layer(
        torch.ones(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("wrong, sentence", [
    (dict(clip=0.), "clip must be finite and > 0, got clip=0.0"),
    (dict(clip=-1.), "clip must be finite and > 0"), (dict(clip=math.nan), "clip must be"),
    (dict(dropout=1.), "dropout must be in [0, 1), got dropout=1.0"),
    (dict(width=2.5), "width must be a whole number"),
    (dict(noise_multiplier=math.inf), "noise_multiplier must be")])
def test_bad_layers(wrong, sentence):
    with pytest.raises(ValueError) as error:
        SanitizationLayer(**dict(width=8, clip=1., noise_multiplier=1.) | wrong)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("clip", [.5, .3, 7.])
@pytest.mark.parametrize("rows", ["nonnegative", "symmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_bits_of_a_row_do_not_tell_records_apart(clip, rows, dtype):
    layer = SanitizationLayer(4, clip, 3., rows=rows, generator=torch.Generator().manual_seed(0))
    for x in (0., clip/3, clip, -clip if rows == "symmetric" else 0.):
        row = torch.full((20_000, 4), x, dtype=dtype)
        small = (found := layer(row).double())[found.abs() < clip/2]
        # no step between those that the other record can make
        assert len(small) > 1000 and ((small/layer.grid) % 1 == 0).all()
        assert stats.kstest(((found - x)/layer.noise_std).flatten()[::7].numpy(),
            "norm").pvalue > 1e-3


def test_gradients_pass_the_grid():
    layer, rows = SanitizationLayer(3, .5, 1., rows="nonnegative"), torch.tensor([[.2, .7, -1.]],
        requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad.tolist() == [[1., 0., 0.]]


@pytest.mark.parametrize("changed, sentence", [(dict(noise_multiplier=-1.),
    "noise_multiplier must be"), (dict(dropout=1.5), "dropout must be in [0, 1)"),
    (dict(rows="any"), "rows must be")])
def test_a_layer_checks_what_was_changed(changed, sentence):
    layer = SanitizationLayer(3, .5, 1.)
    for name, value in changed.items(): setattr(layer, name, value)
    with pytest.raises(ValueError) as error: layer(torch.zeros(2, 3))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_only_a_plain_chain_is_certified():
    frozen = freeze_below(funnel(5, 3, in_features=9, sanitization=SanitizationLayer(5, .5, 4.)))
    parts, plan = dict(frozen.named_children()), PoissonPlan(dataset_size=100,
        expected_batch_size=10, epochs=2)
    assert model_report(frozen, plan, delta=1e-5).certified
    class Around(torch.nn.Sequential):
        def forward(self, x): return self.head(self.below(x))
    class Quiet(SanitizationLayer):
        def forward(self, rows): return rows
    shortcut = copy.deepcopy(frozen)
    shortcut.forward = lambda x: shortcut.head(shortcut.below(x))
    silenced = copy.deepcopy(frozen)
    silenced.sanitization.forward = lambda rows: rows
    for model in (shortcut, silenced, torch.nn.Sequential(OrderedDict(parts
        | {"sanitization": Quiet(5, .5, 4.)}))):
        with pytest.raises(ValueError, match="each as it is here and not derived from it"):
            model_report(model, plan, delta=1e-5)
    for model in (torch.nn.Sequential(OrderedDict(stem=torch.nn.Linear(9, 9), **parts)),
        torch.nn.Sequential(OrderedDict(**parts, tail=torch.nn.Linear(3, 3))),
        Around(OrderedDict(parts))):
        with pytest.raises(ValueError,
            match="model must be an nn.Sequential of below, sanitization"):
            model_report(model, plan, delta=1e-5)


def test_weights_that_learned_and_were_frozen_later_are_not_certified():
    model, plan = funnel(5, 3, in_features=9, sanitization=SanitizationLayer(5, .5,
        4.)), PoissonPlan(dataset_size=100, expected_batch_size=10, epochs=2)
    assert model_report(freeze_below(copy.deepcopy(model)), plan, delta=1e-5).certified
    model(torch.randn(4, 9)).sum().backward()
    late = freeze_below(model)
    saved = freeze_below(funnel(5, 3, in_features=9, sanitization=SanitizationLayer(5, .5, 4.)))
    saved.load_state_dict(late.state_dict())
    for one in (late, copy.deepcopy(late), saved):
        assert model_report(one, plan,
                            delta=1e-5).case == (
            "weights below trained on raw features, rows released 2 times")
        assert model_report(one, plan, delta=1e-5).certified == {}
        assert model_report(one, plan, delta=1e-5,
            below="public").case == "weights below from public data, rows released 2 times"
    with pytest.raises(ValueError, match="below must be public or None, got below='frozen'"):
        model_report(late, plan, delta=1e-5, below="frozen")


def test_widths_that_do_not_fit():
    layer = SanitizationLayer(40, .5, 1.)
    with pytest.raises(ValueError, match=r"got width=40 for an input of shape \(2, 50\)"):
        layer(torch.zeros(2, 50))
    with pytest.raises(ValueError, match="one row per record"): layer(torch.zeros(2, 3, 40))
    with pytest.raises(ValueError, match="width must be 512 for this network, got width=40"):
        sanitization_resnet18(sanitization=layer)
    with pytest.raises(ValueError, match="width must be 64 for this network, got width=40"):
        sanitization_resnet18(sanitization=layer, stages=1)
    with pytest.raises(ValueError, match="stages must be 1, 2, 3 or 4, got stages=5"):
        sanitization_resnet18(sanitization=layer, stages=5)
    with pytest.raises(ValueError, match="width must be 50 for this network, got width=40"):
        funnel(50, 10, in_features=9, sanitization=layer)


def test_networks_keep_records_apart():
    for model, shape in ((sanitization_cnn(12, sanitization=SanitizationLayer(12, .5, 1.),
        image_size=8), (1, 8, 8)), (sanitization_resnet18(sanitization=SanitizationLayer(512, .5,
        1.), channels=1), (1, 32, 32)),
                         (sanitization_resnet18(sanitization=SanitizationLayer(128, .5, 1.),
                         channels=1, stages=2), (1, 8, 8))):
        images = torch.randn(3, *shape)
        changed = images.clone()
        changed[0] += 1
        one, two = model.below(images), model.below(changed)
        assert torch.equal(one[1:], two[1:]) and not torch.equal(one[0],
            two[0]) and (one >= 0).all() and not list(model.buffers())
        assert one.shape == (3, model.head.in_features)


def test_resnet_is_torchvisions_and_builds_only_its_stages():
    from torchvision.models import resnet18
    torch.manual_seed(0)
    ours = sanitization_resnet18(sanitization=SanitizationLayer(512, .5, 1.)).below.state_dict()
    torch.manual_seed(0)
    theirs = resnet18(norm_layer=lambda features: torch.nn.GroupNorm(32, features)).state_dict()
    assert list(ours) == [name for name in theirs
        if not name.startswith("fc.")] and all(torch.equal(ours[name], theirs[name])
        for name in ours)
    first = sanitization_resnet18(sanitization=SanitizationLayer(64, .5, 1.),
        stages=1).below.state_dict()
    assert {name: p.shape for name, p in first.items()} == {name: p.shape
        for name, p in ours.items() if not name.startswith(("layer2", "layer3", "layer4"))}


@pytest.mark.slow
def test_layer_costs_at_most_a_twentieth_of_a_step():
    from bench.sanitization_layer import GOAL, ROWS, measured
    assert GOAL == 1.05
    for name, row in ROWS.items():
        layer, plain = measured(*row)
        assert 1 + layer/plain <= GOAL, name


def test_report_follows_the_weights_below():
    model = sanitization_cnn(12, sanitization=SanitizationLayer(12, .5, 20.), image_size=8)
    assert model_report(model, PLAN, delta=1e-5).certified == {}
    frozen = model_report(freeze_below(copy.deepcopy(model)), PLAN, delta=1e-5, releases=1)
    np.testing.assert_allclose(frozen.epsilon, row_epsilon(RowRelease(width=12,
        noise_multiplier=20., releases=1, rows="nonnegative"), delta=1e-5))
    # one weight that learns is enough
    next(freeze_below(model).below.parameters()).requires_grad_(True)
    assert model_report(model, PLAN, delta=1e-5).certified == {}
    model.below.append(nn.BatchNorm1d(12))
    with pytest.raises(ValueError, match="must not mix records"):
        model_report(model, PLAN, delta=1e-5)
