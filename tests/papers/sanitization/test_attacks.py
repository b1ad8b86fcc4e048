"Attacks on runs of paper sanitization stay within what is certified, and find planted faults."
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq

from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.budgets.outputs import gaussian_delta
from dp_companion.papers.sanitization.attacks import (
    attack_below, attack_epoch, attack_rows, attack_step, audit_layers, certified_epoch,
    certified_step, claimed_there, epoch_scores, moved, row_scores, short, step_scores
)
from dp_companion.papers.sanitization.grid import printed_values
from dp_companion.training.records import find_record
from dp_companion.training.spec import run_spec
from dp_companion.training.training import train
from sanitized_runs import DATA, SIZE, SPECS, below_spec


@pytest.mark.slow
def test_printed_is_told_apart_whatever_the_noise():
    loud = run_spec(**printed_values(SIZE, layer_noise_multiplier=22.), seed=0)
    # of one and the same run
    claim, found = claimed_there(short(loud, 3), 64), attack_below(loud, draws=60, epochs=3,
        records=64)
    assert claim < .1 and found.epsilon > 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Frozen", "One release"])
def test_frozen_versions_hold_in_20_runs(method):
    spec = SPECS[method]
    # nothing below moves, in 20 runs
    with_weights = short(replace(spec, model="small_sanitization_cnn"))
    assert [moved(with_weights, is_bright, seed) for is_bright in (False, True)
            for seed in range(10)] == [0]*20
    # the bounds hold together
    found = [attack_rows(spec, draws=4000, seed=seed, confidence=1 - .05/20).epsilon
             for seed in range(20)]
    assert max(found) <= spec.target_epsilon and max(found) > .5*spec.target_epsilon


@pytest.mark.slow
def test_below_holds_in_four_runs():
    spec = below_spec(noise_multiplier=4.)
    # the bounds hold together; a run takes half a minute
    found = [attack_epoch(spec, draws=2000, seed=seed, confidence=1 - .05/4).epsilon
             for seed in range(4)]
    assert .5*certified_epoch(spec) < max(found) <= certified_epoch(spec)


@pytest.mark.slow
def test_a_step_with_half_of_the_noise_is_found_out(monkeypatch):
    spec, fill = below_spec(noise_multiplier=4.), GaussianNoise.fill_
    assert attack_step(spec, draws=1000).epsilon <= certified_step(spec)
    monkeypatch.setattr(GaussianNoise, "fill_", lambda self, out, std: fill(self, out, std/2))
    assert attack_step(spec, draws=1000).epsilon > certified_step(spec)
    assert attack_epoch(spec, draws=1000).epsilon > certified_epoch(spec)


@pytest.mark.slow
def test_an_epoch_composes_its_step_and_its_row():
    spec = below_spec(noise_multiplier=4., layer_noise_multiplier=2.)
    out, into = (epoch_scores(spec, is_bright, 2000, 7 + is_bright) for is_bright in (False, True))
    mu = math.hypot(2/4., 1/2.) # of the step and of the row: half of its square each
    # four standard errors
    assert (into.mean() - out.mean())/np.sqrt((into.var() + out.var())/2) == pytest.approx(mu,
        abs=4*math.sqrt(2/2000))
    assert certified_epoch(spec) == pytest.approx(brentq(lambda e: gaussian_delta(1/mu,
        sensitivity=1., epsilon=e) - spec.delta, .1, 20), rel=1e-3)


@pytest.mark.slow
def test_step_scores_have_the_accounted_distance():
    spec = below_spec(noise_multiplier=2.)
    out, into = (step_scores(spec, sign, 4000, 7 + sign) for sign in (-1, 1))
    assert (into.mean() - out.mean())/np.sqrt((into.var() + out.var())/2) == pytest.approx(
        2/spec.method.noise_multiplier, rel=.05)
    assert into.mean() == pytest.approx(1, abs=.15) and out.mean() == pytest.approx(-1, abs=.15)


def test_row_scores_have_the_accounted_distance():
    spec = SPECS["Frozen"]
    out, into = (row_scores(spec, is_bright, 20_000, 7 + is_bright) for is_bright in (False, True))
    mu = (into.mean() - out.mean())/np.sqrt((into.var() + out.var())/2)
    assert mu == pytest.approx(math.sqrt(spec.epochs)/spec.method.layer_noise_multiplier, rel=.03)


def test_audited_records_keep_three_epsilons(tmp_path):
    spec = SPECS["One release"]
    record = train(spec, tmp_path, DATA)
    (made,) = audit_layers([record], lambda s: SIZE.plan, tmp_path)
    assert find_record(spec, tmp_path) == made
    assert 0 < made.budget["empirical"]["epsilon"] <= made.budget["certified"]["pld"]["epsilon"]
    assert made.spec.name == record.spec.name and made.final == record.final
