"Bounds: they hold, they are near, and they refuse to cheat."
import math
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import special, stats
from dp_companion.audits.bounds import (
    Finding, epsilon_to_mu, finding_from_scores, _gaussian_errors_bound, _gaussian_ranks_bound,
    _gaussian_rates_bound, mu_to_epsilon, one_run_bound, _one_run_gaussian_bound, _one_run_p_value,
    _rate_upper, rates_bound, _share_moments
)
from dp_companion.budgets.certified import budget_report, certify
from dp_companion.budgets.events import MechanismEvent

DELTA = 1e-5


def one_step(sigma): return (MechanismEvent(noise_multiplier=sigma, sample_rate=1, steps=1),)


@pytest.mark.parametrize(
    "counts, delta, reference",
    [
        ((100, 100, 75), 0, .702), ((100, 100, 75), 1e-4, .699), ((1000, 100, 75), 1e-4, .673),
        ((100_000, 1510, 1439), 1e-5, 2.676)
    ]
)
def test_one_run_reference_values(counts, delta, reference):
    assert abs(one_run_bound(*counts, delta=delta) - reference) <= 5.1e-4


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.integers(1, 60), st.integers(0, 60), st.integers(0, 100), st.floats(0, 5),
    st.sampled_from([0, 1e-6, 1e-3])
)
def test_one_run_p_value_is_the_brute_force_sum(r, v, abstained, epsilon, delta):
    v, m, q = min(v, r), r + abstained, 1/(1 + math.exp(-epsilon))
    pmf = [math.comb(r, i)*q**i*(1 - q)**(r - i) for i in range(r + 1)]
    worst = max([math.fsum(pmf[v - i:v])/i for i in range(1, v + 1)], default=0)
    assert math.isclose(
        _one_run_p_value(epsilon, m, r, v, delta=delta),
        min(math.fsum(pmf[v:]) + 2*m*delta*worst, 1), rel_tol=1e-7, abs_tol=1e-12
    )


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 300), st.floats(.5, .999))
def test_rate_upper_inverts_the_binomial(N, k, confidence):
    k = min(k, N)
    p = _rate_upper(k, N, confidence=confidence)
    assert p == 1 if k == N else math.isclose(
        stats.binom.cdf(k, N, p), 1 - confidence, rel_tol=1e-6
    )


@pytest.mark.parametrize("target", [.3, 1, 4, 8])
def test_gaussian_bounds_hold_and_are_near(target):
    rng, mu, N = np.random.default_rng(0), epsilon_to_mu(target, delta=DELTA), 10_000
    fp, fn = rng.binomial(N, special.ndtr(-mu/2), (2, 4000))
    for bound in (
        _gaussian_rates_bound(fp, N, fn, N, confidence=.95),
        _gaussian_errors_bound(fp + fn, 2*N, confidence=.95)
    ):
        assert (bound <= mu).mean() >= .95 - 3*math.sqrt(.05*.95/4000)
        assert mu_to_epsilon(np.median(bound), delta=DELTA) > (.25 if target < 1 else .75)*target
    assert (rates_bound(fp, N, fn, N, delta=DELTA, confidence=.95) <= target).all()


def test_gaussian_epsilon_agrees_with_the_accountant():
    for mu in (.2, 1, 3):
        assert math.isclose(
            certify(one_step(1/mu), delta=DELTA)["pld"].epsilon, mu_to_epsilon(mu, delta=DELTA),
            rel_tol=1e-3
        )


def test_split_and_named_thresholds_do_not_cheat():
    rng, false = np.random.default_rng(1), np.zeros(2)
    for _ in range(300):
        out, into = rng.standard_normal((2, 200))
        for k, thresholds in enumerate((None, (-1., 0., 1.))):
            false[k] += finding_from_scores(
                out, into, delta=1e-9, method="gaussian_errors", thresholds=thresholds
            ).epsilon > 0
    assert (false <= 300*.05 + 3*math.sqrt(300*.05*.95)).all()


def test_ranks_see_order_alone_and_count_ties_against_the_attack():
    rng = np.random.default_rng(3)
    out, into = rng.standard_normal(300), rng.standard_normal(300) + 1
    bound = _gaussian_ranks_bound(out, into, confidence=.95)
    assert 0 < bound < 1.3
    assert bound == _gaussian_ranks_bound(np.exp(out), np.exp(into), confidence=.95)
    assert _gaussian_ranks_bound(into, out, confidence=.95) == 0
    assert _gaussian_ranks_bound(np.floor(out), np.floor(into), confidence=.95) < bound
    share, (mean, spread) = (into[:, None] > out).mean(), _share_moments(bound, 300, 300)
    assert math.isclose(mean + stats.norm.ppf(.95)*spread, share, rel_tol=1e-9)


def test_findings_do_not_depend_on_the_scale_of_scores():
    rng = np.random.default_rng(2)
    out, into = rng.standard_normal(3000), rng.standard_normal(3000) + 1.5
    found = [
        finding_from_scores(f(out), f(into), delta=DELTA).epsilon
        for f in (lambda x: x, lambda x: 1e6*x - 7, np.exp)
    ]
    assert max(found) - min(found) < .1*max(found)
    assert min(found) > .5


@pytest.mark.slow
def test_one_run_bounds_are_monotone_and_finite():
    for bound in (one_run_bound, _one_run_gaussian_bound):
        values = [bound(500, 50, v, delta=DELTA) for v in range(0, 51, 5)]
        assert (np.diff(values) >= -1e-9).all()
        assert values[0] == 0
        assert 1 < values[-1] < 50


def test_a_finding_joins_the_report():
    finding = Finding(epsilon=2.5, delta=DELTA, confidence=.95, method="rates", draws=100, seed=1)
    report = budget_report(one_step(1.), delta=DELTA, empirical=finding).to_dict()
    assert report["empirical"] == {
        "epsilon": 2.5, "delta": DELTA, "confidence": .95, "method": "rates", "draws": 100,
        "seed": 1
    }
