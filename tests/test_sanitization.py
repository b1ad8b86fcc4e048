"Sanitization: releases and their cost, the layer, flags on released values, the attack below it."
import copy
import json
import math
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import gammaln, logsumexp
from torch import nn

from dp_companion.papers.sanitization.early_stopping import (
    ReleasedStd, SlopeFlag, TrendFlag, epoch_error, follow_weights, moving_bound)
from dp_companion.algorithms.sanitization import (
    SanitizationLayer, freeze_below, funnel, model_report, sanitization_cnn, sanitization_resnet18)
from dp_companion.audits.bounds import finding_from_scores
from dp_companion.papers.sanitization.below_the_layer import (
    features_from_change, first_layer_change, first_layer_scores, marked)
from dp_companion.budgets.certified import certify
from dp_companion.budgets.claims import SANITIZATION_CLAIMS
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.rdp import ORDERS, rdp_of_events, rdp_to_epsilon
from dp_companion.budgets.released_rows import (
    RowRelease,
    calibrate_rows,
    claimed_rows,
    _known_batches as known_batches,
    row_epsilon,
    row_events as row_events,
    _row_rdp as row_rdp,
    sanitization_report,
)
from dp_companion.budgets.schedules import PoissonPlan

quick = settings(derandomize=True, deadline=None, max_examples=60)
releases = st.builds(RowRelease, width=st.integers(1, 600), noise_multiplier=st.floats(.3, 60),
    releases=st.integers(1, 120), dropout=st.sampled_from([0., .1, .5, .9]),
                     rows=st.sampled_from(["symmetric", "nonnegative"]),
                     dropout_position=st.sampled_from(["before", "after"]),
                     sample_rate=st.sampled_from([1., .2]))
relations = st.sampled_from(["replace_one", "replace_special"])
PLAN = PoissonPlan(dataset_size=50000, expected_batch_size=250, epochs=100)
RESNET = RowRelease(width=512, noise_multiplier=1., releases=100)


def seeded(seed): return torch.Generator().manual_seed(seed)


# budgets

@pytest.mark.parametrize("c", SANITIZATION_CLAIMS, ids=lambda c: f"{c.model}-{c.epochs}")
def test_printed_epsilons(c):
    plan = PoissonPlan(dataset_size=c.dataset_size, expected_batch_size=c.batch_size,
        epochs=c.epochs)
    found = claimed_rows(replace(RESNET, releases=c.epochs), plan, delta=1e-5).epsilon
    decimals = len(c.printed.partition(".")[2])
    assert float(c.printed) in (round(found, decimals), math.floor(found*10**decimals)/10**decimals)


# "ε = 1.0 for σ = 1", Section 6.2: the batch of 20 that the CNN's other values want
def test_mnist_epsilon_of_the_text():
    found = claimed_rows(RESNET, PoissonPlan(dataset_size=60000, expected_batch_size=20,
        epochs=100), delta=1e-5).epsilon
    assert f"{found:.1f}" == "1.0"


def test_binomial_sum_term_by_term():
    release = RowRelease(width=30, noise_multiplier=1.5, releases=1, dropout=.3)
    k, a = np.arange(31), release.unit_shift()
    log_pmf = gammaln(31) - gammaln(k + 1) - gammaln(31 - k) + k*math.log(.7) + (30 - k)*math.log(
        .3)
    orders = np.array([1.1, 2., 7.5, 40.])
    direct = [logsumexp(log_pmf + alpha*(alpha - 1)*k*a*a/2)/(alpha - 1) for alpha in orders]
    np.testing.assert_allclose(row_rdp(release, orders), direct, rtol=1e-10)


@quick
@given(releases, relations)
def test_exact_is_below_rdp_and_events(release, relation):
    exact = row_epsilon(release, delta=1e-5, neighbouring_relation=relation)
    by_rdp = rdp_to_epsilon(row_rdp(release, neighbouring_relation=relation), delta=1e-5).epsilon
    assert exact <= by_rdp*(1 + 1e-6) + 1e-9
    if relation == "replace_special": # events are never more private than the release
        assert (row_rdp(release, neighbouring_relation=relation) <= rdp_of_events(
            row_events(release, neighbouring_relation=relation))*(1 + 1e-9)).all()


@quick
@given(releases, relations)
def test_monotone(release, relation):
    def epsilon(**changes):
        return row_epsilon(replace(release, dropout_position="after", **changes), delta=1e-5,
            neighbouring_relation=relation)
    here = epsilon()
    assert epsilon(noise_multiplier=release.noise_multiplier*1.1) <= here*(1
        + 1e-8) <= epsilon(releases=release.releases + 1)*(1 + 2e-8)
    assert row_epsilon(replace(release, dropout_position="before"), delta=1e-5,
        neighbouring_relation="replace_one") == row_epsilon(replace(release,
        dropout_position="after"), delta=1e-5)


@pytest.mark.parametrize("p", [.2, .6])
def test_hidden_mask_costs_less_than_a_visible_one(p):
    release = RowRelease(width=20, noise_multiplier=2., releases=10, dropout=p,
        dropout_position="before")
    hidden, visible = (row_epsilon(replace(release, dropout_position=where), delta=1e-5,
        neighbouring_relation="replace_special") for where in ("before", "after"))
    assert 0 < hidden < visible


def test_events_agree_with_pld_without_dropout():
    for relation in ("replace_one", "replace_special"):
        for rows in ("symmetric", "nonnegative"):
            release = RowRelease(width=7, noise_multiplier=3., releases=20, rows=rows)
            grid = certify(row_events(release, neighbouring_relation=relation), delta=1e-6,
                accountants=("pld",), neighbouring_relation=relation)["pld"].epsilon
            np.testing.assert_allclose(row_epsilon(release, delta=1e-6,
                neighbouring_relation=relation), grid, rtol=1e-5)


def test_calibrated_noise_never_overshoots():
    for release in (RESNET, replace(RESNET, releases=1, width=10, dropout=.5),
        replace(RESNET, sample_rate=.1, rows="nonnegative")):
        sigma = calibrate_rows(release, target_epsilon=2., delta=1e-5)
        assert 2*(1 - 1e-3) <= row_epsilon(replace(release, noise_multiplier=sigma),
            delta=1e-5) <= 2


def test_trained_below_is_never_certified():
    report = sanitization_report(replace(RESNET, noise_multiplier=1e6), PLAN, below="trained",
        delta=1e-5)
    assert report.certified == {} and report.epsilon == math.inf and report.claimed.epsilon < .01
    assert not [p for p in report.preconditions if "below" in p.name][0].holds
    assert "nothing is certified" in report.verdict
    json.dumps(report.to_dict(), allow_nan=False)


def test_dp_sgd_below_composes():
    gradients = (MechanismEvent(noise_multiplier=3., sample_rate=PLAN.sample_rate,
        steps=PLAN.steps),)
    quiet = replace(RESNET, noise_multiplier=50.)
    use = dict(below="dp_sgd", delta=1e-5, gradient_events=gradients,
        neighbouring_relation="replace_special")
    own, shared = (sanitization_report(quiet, PLAN, batches=b, **use) for b in ("own", "shared"))
    alone = certify(gradients, delta=1e-5, neighbouring_relation="replace_special")["pld"].epsilon
    rows = sanitization_report(quiet, PLAN, below="frozen", delta=1e-5,
        neighbouring_relation="replace_special").epsilon
    assert max(alone, rows) < own.epsilon < shared.epsilon
    rdp = rdp_to_epsilon(row_rdp(quiet, neighbouring_relation="replace_special") + rdp_of_events(
        gradients), delta=1e-5).epsilon
    np.testing.assert_allclose(own.certified["rdp"].epsilon, rdp)
    assert known_batches(gradients)[0].steps == PLAN.epochs and own.certified["pld"].epsilon <= rdp


@pytest.mark.parametrize("wrong, sentence", [
    (dict(dropout=1.), "dropout must be in [0, 1), got dropout=1.0"),
    (dict(dropout=-.5), "dropout must be in [0, 1)"),
    (dict(dropout=math.nan), "dropout must be in [0, 1)"),
    (dict(width=0), "width must be"), (dict(noise_multiplier=0.), "noise_multiplier must be"),
    (dict(releases=0), "releases must be"), (dict(rows="any"), "rows must be one of"),
    (dict(sample_rate=0.), "sample_rate must be in (0, 1]"),
    (dict(dropout_position="over"), "dropout_position must be one of")])
def test_bad_releases(wrong, sentence):
    with pytest.raises(ValueError) as error: replace(RESNET, **wrong)
    assert sentence in str(error.value)


def test_released_rows_have_no_add_or_remove():
    with pytest.raises(ValueError, match="a released row shows that its record is there"):
        row_rdp(RESNET, ORDERS, neighbouring_relation="add_or_remove_one")


# the layer

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


# flags and the moving bound

def test_flags_see_released_values_only():
    layer = SanitizationLayer(400, .5, 1., .25, generator=seeded(0))
    watch = ReleasedStd(layer)
    # evaluation is not watched
    layer(torch.full((300, 400), 9.))
    layer.eval()(torch.randn(300, 400))
    assert watch.close_epoch() == pytest.approx(layer.noise_std, rel=.01) and watch.batches == []
    assert math.isnan(watch.close_epoch())
    watch.remove()
    layer.train()(torch.randn(3, 400))
    assert watch.batches == []


def test_flags_against_plain_loops():
    stds = np.random.default_rng(1).normal(1, 1e-3, 40)
    slopes = [np.polyfit(range(6), stds[i:i + 6], 1)[0] for i in range(35)]
    expected = [e >= 7 and abs(slopes[e - 6] - slopes[e - 7]) <= 2e-4 for e in range(1, 41)]
    assert TrendFlag(window=6, tolerance=2e-4, epochs=40).flags(stds).tolist() == expected
    flag = SlopeFlag(window=6, threshold=1e-4, epochs=40)
    assert flag.flags(stds).tolist() == [e >= 6 and abs(stds[e - 1] - stds[e - 6])/5 <= 1e-4
        for e in range(1, 41)]
    assert flag.first(stds) == flag.flags(stds).tolist().index(True) + 1 and flag.flags(
        []).shape == (0,)


def test_chance_of_the_papers_resnet_flag():
    error = epoch_error(.5*math.sqrt(512), width=512, rows=50_000)
    assert SlopeFlag(window=10, threshold=1.5e-5, epochs=100).chance(error) == pytest.approx(
        math.erf(1.5e-5*9/(2*error)), rel=1e-6)
    assert SlopeFlag(window=10, threshold=1.5e-5, epochs=100).chance(error) < .06


@pytest.mark.parametrize("build, sentence", [
    (lambda: SlopeFlag(window=11, threshold=1e-4, epochs=10),
    "window must be <= 10 for a run of 10 epochs, got window=11"),
    (lambda: TrendFlag(window=10, tolerance=1e-4, epochs=10),
    "window must be <= 9 for a run of 10 epochs, got window=10"),
    (lambda: SlopeFlag(window=5, threshold=-1., epochs=10), "threshold must be"),
    (lambda: TrendFlag(window=5, tolerance=0., epochs=10), "tolerance must be"),
    (lambda: moving_bound(torch.ones(3), bound_ratio=0.), "bound_ratio must be"),
    (lambda: moving_bound(torch.zeros(3), bound_ratio=1.), "weight must be")])
def test_bad_flags_and_bounds(build, sentence):
    with pytest.raises(ValueError) as error: build()
    assert sentence in str(error.value)


def test_moving_bound():
    layer = SanitizationLayer(3, 1., 1.)
    assert follow_weights(layer, torch.full((3, 3), 2.),
        bound_ratio=.5) == layer.clip == pytest.approx(3.)


# below the layer

@pytest.mark.slow
def test_more_than_5_where_less_than_a_tenth_is_printed():
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    features, labels = torch.tensor(images[:200]/16,
        dtype=torch.float32), torch.tensor(labels[:200])
    plan = PoissonPlan(dataset_size=200, expected_batch_size=20, epochs=2)
    claim = claimed_rows(RowRelease(width=16, noise_multiplier=20., releases=2), plan,
        delta=1e-5).epsilon
    scores = [first_layer_scores(x, labels, plan, draws=640, noise_multiplier=20., seed=10_000*k)
        for k, x in enumerate((features, marked(features)))]
    assert claim < .1 and finding_from_scores(*scores, delta=1e-5, thresholds=(0.,),
        confidence=.95).epsilon > 5


def test_one_pixel_moves_the_first_layer():
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    features, labels = torch.tensor(images[:60]/16, dtype=torch.float32), torch.tensor(labels[:60])
    plan = PoissonPlan(dataset_size=60, expected_batch_size=10, epochs=2)
    scores = {name: first_layer_scores(x, labels, plan, draws=25, noise_multiplier=20., seed=0,
        frozen=frozen)
              for name, x, frozen in (("out", features, False), ("in", marked(features), False),
              ("frozen", marked(features), True))}
    assert (scores["out"] == 0).all() and (scores["in"] > 0).mean() > .9 and (
        scores["frozen"] == 0).all()


def test_one_step_shows_the_record():
    x = torch.rand(1, 30, generator=seeded(0))
    # noise so large that it sometimes makes the right class certain, and the gradient exactly
    # zero: not with this seed
    layer = SanitizationLayer(16, .3, 1e3, generator=seeded(2))
    change = first_layer_change(x, torch.tensor([3]),
        PoissonPlan(dataset_size=1, expected_batch_size=1, epochs=1), layer, seed=1)
    assert torch.nn.functional.cosine_similarity(features_from_change(change), x[0].double(),
        dim=0) > .9999
