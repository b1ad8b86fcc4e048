"Runs of paper sad: noise and bound of every step are the certified ones."
import math
from dataclasses import replace

import numpy as np
import pytest

import dp_companion.training.run as one_run
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.papers.sad.grid import TABLE_II, sad_profile, sad_values
from dp_companion.training.datasets import load_dataset
from dp_companion.training.grid import specs_of
from dp_companion.training.records import read_record
from dp_companion.training.run import Run
from dp_companion.training.spec import run_spec
from dp_companion.training.training import train
from killed_runs import whole_and_parts

SMALL = dict(epochs=2, expected_batch_size=128)
SAD = sad_values(sad_profile("digits"), "SAD-DPSGD", **SMALL)


def spec_of(values, noise_multiplier=3., target_epsilon=3., seed=0):
    return run_spec(**values, accounting="certified", noise_multiplier=noise_multiplier,
                    target_epsilon=target_epsilon, seed=seed)


@pytest.fixture(scope="module")
def digits(): return load_dataset("minority_digits")


@pytest.fixture
def drawn(monkeypatch):
    "The standard deviation of every gradient's noise, as it is drawn."
    stds, real = [], GaussianNoise.fill_
    monkeypatch.setattr(GaussianNoise, "fill_", lambda self, out, std: (stds.append(std),
        real(self, out, std))[1])
    return stds


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_multiplier_of_another_step_stops_the_run(tmp_path, digits, monkeypatch):
    monkeypatch.setattr(one_run, "multipliers_ahead",
                        lambda training: iter(
                            training.multipliers[training.batches.steps_taken:].tolist()[::-1]))
    with pytest.raises(RuntimeError, match="applied noise multipliers must equal"):
        train(spec_of(SAD), tmp_path, digits)
QUANTILE = sad_values(sad_profile("digits"), "Auto-DPSGD-S, private threshold", **SMALL,
                      drop_every=1)


@pytest.mark.slow
@pytest.mark.parametrize("values", [SAD, QUANTILE], ids=["stages", "quantile"])
def test_a_killed_run_ends_the_same(tmp_path, monkeypatch, digits, values):
    spec = spec_of(values | {"epochs": 3}, noise_multiplier=4.)
    whole, parts = whole_and_parts(spec, tmp_path, digits, monkeypatch)
    assert whole.read_bytes() == parts.read_bytes()
    assert read_record(parts).final["test_precision"] is not None


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
def test_a_wrong_spec_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as error: spec_of({**SAD, **changes})
    assert "\n" not in str(error.value)


def test_a_run_that_cannot_be_is_refused_before_it_trains(tmp_path, digits):
    with pytest.raises(ValueError, match="clip_rule must be one of none, flat"):
        spec_of({**SAD, "clip_rule": "scissors"})
    for spec, sentence in ((spec_of(SAD, noise_multiplier=.3),
                            "noise_multiplier must be certified for target_epsilon=3.0"),
                           (spec_of({**SAD, "stages": 500}),
                            "length must be enough for one step in each of 500 stages")):
        with pytest.raises(ValueError, match=sentence): train(spec, tmp_path, digits)


def test_a_run_refuses_data_of_another_size(digits):
    "As many steps an epoch may hide the change."
    fewer = replace(digits, train_images=digits.train_images[:-30],
                    train_labels=digits.train_labels[:-30])
    with pytest.raises(ValueError, match="dataset_size must be the checkpoint's "
                       f"{len(digits.train_labels)}, "
                       f"got dataset_size={len(digits.train_labels)-30}"):
        Run(spec_of(SAD), fewer).load(Run(spec_of(SAD), digits).state())
