"Runs of sad and adaptive_noise: certified as applied, filters hold, killed runs end the same."
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis.rdp import compute_rdp

import dp_companion.training.run as one_run
import dp_companion.training.training as training
from dp_companion.papers.adaptive_noise.following import (
    BatchClip, BatchStep, FollowingNoise, following_state, load_following
)
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.budgets.filters import RenyiFilter
from dp_companion.budgets.schedules import PoissonPlan
from dp_companion.training.datasets import load_dataset
from dp_companion.training.grid import specs_of
from dp_companion.papers.adaptive_noise.grid import adaptive_profile, adaptive_values
from dp_companion.papers.sad.grid import SAD_METHODS, TABLE_II, sad_profile, sad_values
from dp_companion.training.records import read_record, record_path
from dp_companion.training.spec import run_spec
from dp_companion.training.run import Run
from dp_companion.training.training import train

SMALL = dict(epochs=2, expected_batch_size=128)
SAD = sad_values(sad_profile("digits"), "SAD-DPSGD", **SMALL)
ADAPTIVE = {m: adaptive_values(adaptive_profile("digits"), f"Adaptive DP-SGD, by {m}", **SMALL,
                               **change) for m, change in (("gradient", {}),
                                   ("loss", {"signal_noise": 8.}))}


SAD_VALUES = {m: sad_values(sad_profile("digits"), m, **SMALL) for m in SAD_METHODS}


def spec_of(values, noise_multiplier=3., target_epsilon=3., seed=0):
    return run_spec(**values, accounting="certified", noise_multiplier=noise_multiplier,
                    target_epsilon=target_epsilon, seed=seed)


@pytest.fixture(scope="module")
def digits(): return load_dataset("minority_digits")


# Stages

@pytest.fixture
def drawn(monkeypatch):
    "The standard deviation of every gradient's noise, as it is drawn."
    stds, real = [], GaussianNoise.fill_
    monkeypatch.setattr(GaussianNoise, "fill_", lambda self, out, std: (stds.append(std),
        real(self, out, std))[1])
    return stds


@pytest.mark.parametrize("method", TABLE_II)
def test_noise_and_bound_of_every_step_are_the_certified_ones(tmp_path, digits, drawn, method):
    values = sad_values(sad_profile("digits"), method, epochs=5, expected_batch_size=128)
    ((spec, *_),) = specs_of(sad_profile("digits"), [(values, "certified", 3.)], runs=tmp_path,
                             workers=1)
    record = train(spec, tmp_path, digits)
    events = record.budget["events"]
    certified = np.repeat([e["noise_multiplier"] for e in events], [e["steps"] for e in events])
    bound = {"SAD-DPSGD": (5/3)**2}.get(method, 1.)
    bounds = np.full(len(certified), bound)
    # bounds by the paper's recursion, at the very steps at which the certified noise changes
    if method == "SAD-DPSGD":
        for t in range(1, len(bounds)):
            bounds[t:] = bounds[t - 1]*(3/5 if certified[t] != certified[t - 1] else 1)
        assert math.isclose(bounds[-1], 1.) and math.isclose(certified[-1], certified[0]/.8**2)
    np.testing.assert_allclose(drawn, certified*bounds/128, rtol=1e-12)
    epsilon = min(float(c["epsilon"]) for c in record.budget["certified"].values())
    assert 3*(1 - 5e-3) < epsilon <= 3 < record.budget["claimed"]["epsilon"]


def test_a_private_threshold_is_counted_and_certified(tmp_path, digits):
    ((spec, *_),) = specs_of(sad_profile("digits"),
                             [(sad_values(sad_profile("digits"), "Auto-DPSGD-S, private threshold",
                                 expected_batch_size=128), "certified", 3.)], runs=tmp_path,
                                 workers=1)
    record = train(spec, tmp_path, digits)
    assert all(e["query"] == "gradient and count within the bound" for e in record.budget["events"])
    np.testing.assert_allclose([e["noise_multiplier"] for e in record.budget["events"]],
                               [(e["noise_multiplier"]**-2 + 1/100)**-.5 for e in record.epochs],
                               rtol=1e-12)
    assert 3*(1 - 5e-3) < min(float(c["epsilon"]) for c in record.budget["certified"].values()) <= 3
    assert len({e["max_grad_norm"] for e in record.epochs}) == spec.epochs # it moves


def test_a_bound_of_another_stage_stops_the_run(digits, monkeypatch):
    run = Run(spec_of(SAD), digits)
    monkeypatch.setattr(one_run, "rule_of_step", lambda rule, bounds,
                        step: replace(rule, max_grad_norm=9.))
    with pytest.raises(RuntimeError, match="applied sensitivity must equal"): run.train_epoch()


def test_a_multiplier_of_another_step_stops_the_run(tmp_path, digits, monkeypatch):
    monkeypatch.setattr(one_run, "multipliers_ahead",
                        lambda training: iter(
                            training.multipliers[training.batches.steps_taken:].tolist()[::-1]))
    with pytest.raises(RuntimeError, match="applied noise multipliers must equal"):
        train(spec_of(SAD), tmp_path, digits)


# Noise that follows

plan = PoissonPlan(dataset_size=1437, expected_batch_size=128, epochs=4)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.floats(-1, 5), min_size=44, max_size=44), st.floats(.1, 1.), st.floats(1.5, 8.),
       st.sampled_from([None, 4., 20.]))
def test_whatever_is_released_the_target_is_kept(signals, floor, initial, loss_noise):
    target = dict(target_epsilon=2., delta=1e-5)
    noise = FollowingNoise(initial=initial, floor=floor, privacy_filter=RenyiFilter.planned(plan,
        **target), sample_rate=plan.sample_rate, signal_noise=loss_noise)
    (order,), applied = noise.filter.shares, []
    for t, value in enumerate(signals):
        if (sigma := noise.next()) is None: break
        applied.append(sigma); noise.see(value)
        if t % 11 == 10: noise.end_epoch()
    joint = [s if loss_noise is None else (s**-2 + loss_noise**-2)**-.5 for s in applied]
    spent = sum(compute_rdp(q=plan.sample_rate, noise_multiplier=s, steps=joint.count(s),
                            orders=[order])[0] for s in set(joint))
    assert spent + math.log1p(-1/order) - (math.log(1e-5) + math.log(order))/(order - 1) <= 2*(1
        + 1e-9)
    assert all(a >= b for a, b in zip(applied, applied[1:]))
    assert min(applied) >= floor*initial*(1 - 1e-12)


@pytest.mark.parametrize("by", ADAPTIVE)
def test_a_run_that_the_filter_ends_holds_what_it_spent(tmp_path, by):
    data = load_dataset("digits")
    record = train(spec_of(ADAPTIVE[by], noise_multiplier=1.3, target_epsilon=2.), tmp_path, data)
    steps = sum(e["steps"] for e in record.epochs)
    assert steps == sum(e["steps"] for e in record.budget["events"]) < 2*1437//128
    assert record.budget["certified"]["rdp"]["epsilon"] == 2.
    assert record.final["filter_reading"] <= 2. and record.budget["claimed"] is None
    assert all("loss" in e["query"] for e in record.budget["events"]) == (by == "loss")


def test_noise_that_was_not_granted_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(one_run, "multipliers_ahead", lambda training: (s*.9
        for s in iter(training.following.next, None)))
    with pytest.raises(RuntimeError,
                       match="applied noise multipliers must equal the .* granted ones"):
        train(spec_of(ADAPTIVE["gradient"]), tmp_path, load_dataset("digits"))


def test_a_state_goes_through_a_file_and_back():
    def new():
        return FollowingNoise(initial=3., floor=.5, privacy_filter=RenyiFilter.planned(plan,
            target_epsilon=2., delta=1e-5), sample_rate=plan.sample_rate)
    noise, other = new(), new()
    for _ in range(5): noise.see(noise.next()/10)
    noise.end_epoch()
    load_following(other, following_state(noise))
    assert following_state(other) == following_state(noise) and other.next() == noise.next()


# Killed and started again

class Killed(Exception): pass


@pytest.mark.parametrize("values", [SAD, *ADAPTIVE.values(),
                                    adaptive_values(adaptive_profile("digits"),
                                        "Algorithm 4.1 as printed", **SMALL),
                                        {**SAD_VALUES["Auto-DPSGD-S, private threshold"],
                                            "drop_every": 1}],
                         ids=["stages", "gradient", "loss", "batch", "quantile"])
def test_a_killed_run_ends_the_same(tmp_path, monkeypatch, values):
    values, data = {**values, "epochs": 3}, load_dataset(values["dataset"])
    spec = spec_of(values, noise_multiplier=4.)
    train(spec, tmp_path/"whole", data)
    real = training.save_checkpoint
    for stop in (1, 2):
        def save(run, path, stop=stop):
            real(run, path)
            if len(run.epochs) == stop: raise Killed
        monkeypatch.setattr(training, "save_checkpoint", save)
        with pytest.raises(Killed): train(spec, tmp_path/"parts", data)
    monkeypatch.setattr(training, "save_checkpoint", real)
    train(spec, tmp_path/"parts", data)
    assert record_path(spec, tmp_path/"whole").read_bytes() == record_path(spec,
        tmp_path/"parts").read_bytes()
    assert read_record(record_path(spec, tmp_path/"parts")).final["test_precision"] is not None


# Algorithm 4.1

def test_the_printed_algorithm_is_as_private_as_twice_its_bound_says():
    "Worst neighbours, one step: mean gap 2C, noise 2C*noise_multiplier, mu 1/noise_multiplier."
    model = torch.nn.Linear(1, 1, bias=False)
    step = BatchStep(model, torch.optim.SGD(model.parameters(), lr=0.),
                     clip_rule=BatchClip(max_grad_norm=.7), generator=torch.Generator().manual_seed(
                         0))
    def seen(inputs):
        step(lambda outputs, targets: outputs[:, 0], torch.tensor(inputs)[:, None],
             torch.zeros(len(inputs)), noise_multiplier=2.)
        return model.weight.grad.item()
    without, together = (np.array([seen(inputs) for _ in range(1500)])
                         for inputs in ([5., 5.], [5., 5., -1e4]))
    mu = (without.mean() - together.mean())/without.std()
    assert abs(mu - 1/2) < 4*math.sqrt(2/1500)


# Bad input

@pytest.mark.parametrize("changes, sentence", [
    (dict(stages=None), "stages must be given exactly when decay=stages"), (dict(stage_ratio=None),
        "stage_ratio must be given exactly when decay=stages"),
    (dict(stages=0), "stages must be a whole number > 0"), (dict(bound_ratio=-1.),
        "bound_ratio must be a finite number > 0"), (dict(decay_rate=math.nan),
            "decay_rate must be a finite number > 0"),
    (dict(noise_floor=.5), "spec must hold only known names, got 'noise_floor'"),
    (dict(adapt_to="loss"),
     "spec must hold only known names, got 'adapt_to'; the nearest known name is"),
    (dict(stage_ratio=1.2), "stage_ratio must be in"),
])
def test_a_spec_says_what_is_wrong_with_it(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as error: spec_of({**SAD, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes, sentence", [
    (dict(adapt_to="weather"), "adapt_to must be one of gradient_norm, loss"),
    (dict(noise_floor=None), "noise_floor must be given exactly"), (dict(noise_floor=1.5),
        "noise_floor must be at most 1"),
    (dict(signal_noise=4.), "signal_noise must be given exactly when adapt_to=loss"),
    (dict(adapt_to="loss"), "signal_noise must be given exactly when adapt_to=loss"),
])
def test_a_spec_whose_noise_follows_says_what_is_wrong_with_it(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        spec_of({**ADAPTIVE["gradient"], **changes})
    assert "\n" not in str(error.value)


def test_a_run_that_cannot_be_is_refused_before_it_trains(tmp_path, digits):
    with pytest.raises(ValueError, match="clip_rule must be one of none, flat"):
        spec_of({**SAD, "clip_rule": "scissors"})
    for spec, sentence in ((spec_of(SAD, noise_multiplier=.3),
                            "noise_multiplier must be certified for target_epsilon=3.0"),
                           (spec_of({**SAD, "stages": 500}),
                            "length must be enough for one step in each of 500 stages")):
        with pytest.raises(ValueError, match=sentence): train(spec, tmp_path, digits)
    with pytest.raises(ValueError, match="initial must be large enough for one step"):
        train(spec_of(ADAPTIVE["gradient"], noise_multiplier=.1), tmp_path, load_dataset("digits"))


@pytest.mark.slow
def test_the_grid_of_paper_adaptive_noise_is_certified(tmp_path):
    size = replace(adaptive_profile("digits"), seeds=1, epochs=2)
    cells = [(adaptive_values(size, m, epochs=2), "certified" if t else "none", t) for m,
             t in (("Non-DP", None), ("DP-SGD", 1.), ("Adaptive DP-SGD, by gradient", 1.),
                   ("Adaptive DP-SGD, by loss", 1.))]
    specs = [cell[0] for cell in specs_of(size, cells, runs=tmp_path, workers=1)]
    assert [s.accounting for s in specs] == ["none", "certified", "certified", "certified"]
    assert specs[1].method.noise_multiplier < min(s.method.noise_multiplier for s in specs[2:])


def test_a_run_does_not_go_on_with_data_of_another_size(digits):
    "As many steps an epoch may hide the change."
    fewer = replace(digits, train_images=digits.train_images[:-30],
                    train_labels=digits.train_labels[:-30])
    with pytest.raises(ValueError, match="dataset_size must be the checkpoint's "
                       f"{len(digits.train_labels)}, "
                       f"got dataset_size={len(digits.train_labels)-30}"):
        Run(spec_of(SAD), fewer).load(Run(spec_of(SAD), digits).state())
