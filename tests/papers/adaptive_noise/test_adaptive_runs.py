"Runs of paper adaptive_noise: a filter ends them, and nothing runs that it did not grant."
from dataclasses import replace

import pytest

import dp_companion.training.run as one_run
from dp_companion.papers.adaptive_noise.grid import adaptive_profile, adaptive_values
from dp_companion.training.datasets import load_dataset
from dp_companion.training.grid import specs_of
from dp_companion.training.records import read_record
from dp_companion.training.spec import run_spec
from dp_companion.training.training import train
from killed_runs import whole_and_parts

SMALL = dict(epochs=2, expected_batch_size=128)
ADAPTIVE = {m: adaptive_values(adaptive_profile("digits"), f"Adaptive DP-SGD, by {m}", **SMALL,
                               **change) for m, change in (("gradient", {}),
                                   ("loss", {"signal_noise": 8.}))}


def spec_of(values, noise_multiplier=3., target_epsilon=3., seed=0):
    return run_spec(**values, accounting="certified", noise_multiplier=noise_multiplier,
                    target_epsilon=target_epsilon, seed=seed)


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
PRINTED = adaptive_values(adaptive_profile("digits"), "Algorithm 4.1 as printed", **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("values", [*ADAPTIVE.values(), PRINTED], ids=["gradient", "loss", "batch"])
def test_a_killed_run_ends_the_same(tmp_path, monkeypatch, values):
    spec = spec_of(values | {"epochs": 3}, noise_multiplier=4.)
    whole, parts = whole_and_parts(spec, tmp_path, load_dataset("digits"), monkeypatch)
    assert whole.read_bytes() == parts.read_bytes()
    assert read_record(parts).final["test_precision"] is not None


@pytest.mark.parametrize("changes, sentence", [
    (dict(adapt_to="weather"), "adapt_to must be one of gradient_norm, loss"),
    (dict(noise_floor=None), "noise_floor must be given exactly"), (dict(noise_floor=1.5),
        "noise_floor must be at most 1"),
    (dict(signal_noise=4.), "signal_noise must be given exactly when adapt_to=loss"),
    (dict(adapt_to="loss"), "signal_noise must be given exactly when adapt_to=loss"),
])
def test_a_wrong_spec_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        spec_of({**ADAPTIVE["gradient"], **changes})
    assert "\n" not in str(error.value)


def test_a_first_step_that_the_filter_refuses_is_an_error(tmp_path):
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
