"Released rows: what a row costs, with and without dropout, and what composes."
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.special import gammaln, logsumexp

from dp_companion.budgets.certified import certify
from dp_companion.budgets.claims import SANITIZATION_CLAIMS
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.rdp import ORDERS, rdp_of_events, rdp_to_epsilon
from dp_companion.budgets.released_rows import (
    RowRelease, calibrate_rows, claimed_rows, _known_batches as known_batches, row_epsilon,
    row_events as row_events, _row_rdp as row_rdp, sanitization_report
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


@pytest.mark.slow
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
