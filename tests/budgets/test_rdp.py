"Rényi accounting against quadrature, Opacus and the exact Gaussian; calibration."
import math
import time

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import optimize, special

from dp_companion.budgets.certified import calibrate, certify
from dp_companion.budgets.events import MechanismEvent, gaussian_events
from dp_companion.budgets.rdp import (ORDERS, calibrate_noise_multiplier, merge_events,
                                      rdp_of_events, rdp_sampled_gaussian, rdp_to_epsilon,
                                      smallest_scale)
from dp_companion.budgets.schedules import Constant, LinearDecay, PoissonPlan, StepDecay, TimeDecay

steady = settings(derandomize=True, deadline=None, max_examples=25)
sigmas = st.floats(math.log(0.01), math.log(100)).map(math.exp)
rates = st.floats(math.log(1e-7), 0).map(math.exp)
orders = st.floats(-5, 1).map(lambda x: 1 + 10**x)
MAIN = PoissonPlan(dataset_size=60000, expected_batch_size=64, epochs=100)
SMALL = PoissonPlan(dataset_size=1000, expected_batch_size=50, epochs=6)
STEP = StepDecay(initial=1, decay_rate=0.5, drop_every=10)


def event(sigma, q=0.01, steps=1, query="gradient"):
    return MechanismEvent(noise_multiplier=sigma, sample_rate=q, steps=steps, query=query)


def by_rdp(events, delta=1e-5): return rdp_to_epsilon(rdp_of_events(events), delta=delta).epsilon


def by_pld(events, delta=1e-5, **kwargs):
    return certify(events, delta=delta, accountants=("pld",), **kwargs)["pld"].epsilon


def exact_gaussian(mu, delta):
    def excess(e):
        high, low = special.log_ndtr(mu/2 - e/mu), special.log_ndtr(-mu/2 - e/mu)
        return high + math.log(-math.expm1(e + low - high)) - math.log(delta)
    return optimize.brentq(excess, 0, mu*mu + 50*mu + 1) if excess(0) > 0 else 0.0


def quadrature(sigma, q, alpha):
    sigma, q, alpha = map(mpmath.mpf, (sigma, q, alpha))
    with mpmath.workdps(25):
        bend = sigma*mpmath.log(1/q - 1) + 1/(2*sigma)
        cuts = ([c + k for c in (0, 1/sigma, 2/sigma, alpha/sigma) for k in (-12, 0, 12)]
                + [bend + k*sigma for k in (-12, -4, 0, 4, 12)])
        cuts = sorted({c for c in cuts if -12 <= c <= alpha/sigma + 12})
        moment = mpmath.quad(lambda x: mpmath.npdf(x)
                             *(1 - q + q*mpmath.exp(x/sigma - 1/(2*sigma**2)))**alpha, cuts)
        return float(mpmath.log(moment)/(alpha - 1))


@pytest.mark.slow
@settings(steady, max_examples=15)
@given(st.floats(math.log(0.03), math.log(10)).map(math.exp),
       st.floats(math.log(1e-4), math.log(0.99)).map(math.exp),
       st.floats(-2, 1).map(lambda x: 1 + 10**x))
def test_divergence_is_the_integral(sigma, q, alpha):
    np.testing.assert_allclose(rdp_sampled_gaussian(sigma, q, [alpha])[0],
                               quadrature(sigma, q, alpha), rtol=1e-4, atol=1e-14)


@pytest.mark.parametrize("q, sigma", [(0.01, 0.5), (0.01, 2), (64/60000, 1), (0.25, 0.8), (0.5, 5)])
def test_divergence_is_opacus(q, sigma):
    from opacus.accountants.analysis.rdp import compute_rdp
    shared = np.array([1 + x/10. for x in range(1, 100)] + list(range(12, 64)))
    theirs = compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=list(shared))
    # Opacus's ln A carries 1e-13
    np.testing.assert_allclose((shared - 1)*rdp_sampled_gaussian(sigma, q, shared),
                               (shared - 1)*theirs, rtol=1e-9, atol=3e-13)
    assert set(shared) <= set(ORDERS)


@steady
@given(sigmas, rates, orders, st.floats(1, 3))
def test_divergence_is_monotone(sigma, q, alpha, more):
    def R(s, p, a): return rdp_sampled_gaussian(s, p, [a])[0]
    here, slack = R(sigma, q, alpha), 1 + 1e-9
    assert R(sigma*more, q, alpha) <= here*slack
    assert here <= R(sigma, min(1, q*more), alpha)*slack
    assert here <= R(sigma, q, 1 + (alpha - 1)*more)*slack
    assert 0 <= here <= alpha/(2*sigma**2)*slack


def test_whole_orders_join_their_neighbours():
    for sigma, q in [(0.1, 1e-3), (1, 0.3), (20, 1e-3)]:
        values = rdp_sampled_gaussian(sigma, q, [3 - 1e-9, 3, 3 + 1e-9, 10 - 1e-9, 10, 10 + 1e-9])
        np.testing.assert_allclose(values[[0, 2, 3, 5]], values[[1, 1, 4, 4]], rtol=1e-7)


@pytest.mark.slow
@settings(steady, max_examples=10)
@given(st.floats(0.1, 100), st.integers(1, 10_000), st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_never_below_the_exact_gaussian(sigma, steps, delta):
    exact = exact_gaussian(math.sqrt(steps)/sigma, delta)
    got = certify([event(sigma, 1, steps)], delta=delta)
    assert exact*(1 - 1e-9) <= got["pld"].epsilon <= got["rdp"].epsilon
    assert got["pld"].epsilon <= exact*1.002 + 1e-9
    assert (exact_gaussian(2*math.sqrt(steps)/sigma, delta)*(1 - 1e-9)
            <= by_pld([event(sigma, 1, steps)], delta, neighbouring_relation="replace_one"))


@steady
@given(sigmas, rates, st.integers(1, 100_000), st.floats(1.01, 3),
       st.floats(-10, -1).map(lambda x: 10**x))
def test_rdp_epsilon_is_monotone(sigma, q, steps, more, delta):
    here, slack = by_rdp([event(sigma, q, steps)], delta), 1 + 1e-9
    assert by_rdp([event(sigma*more, q, steps)], delta) <= here*slack
    assert here <= by_rdp([event(sigma, min(1, q*more), steps)], delta)*slack
    assert here <= by_rdp([event(sigma, q, math.ceil(steps*more))], delta)*slack
    assert by_rdp([event(sigma, q, steps)], min(0.99, delta*more)) <= here*slack
    assert here <= by_rdp([event(sigma, q, steps), event(50, 0.1, 10, "count")], delta)*slack


@pytest.mark.slow
def test_many_multipliers_are_rounded_down():
    events = gaussian_events(LinearDecay(initial=4, decay_rate=0.9995, unit="step"),
                             PoissonPlan(dataset_size=1000, expected_batch_size=10, epochs=20))
    kept = merge_events(events, at_most=64)
    assert len(kept) <= 65 and sum(e.steps for e in kept) == len(events)
    assert by_rdp(events) <= by_rdp(kept) <= by_rdp(events)*1.03
    assert min(e.noise_multiplier for e in kept) >= min(e.noise_multiplier
                                                        for e in events)*(1 - 1e-12)


@settings(steady, max_examples=12)
@given(
    st.sampled_from([Constant(initial=5), StepDecay(initial=2, decay_rate=0.5, drop_every=2),
                     LinearDecay(initial=1, decay_rate=0.9), TimeDecay(initial=1, decay_rate=0.1)]),
    st.floats(math.log(0.005), math.log(1e4)).map(math.exp), st.sampled_from([1e-3, 1e-5, 1e-10]))
def test_rdp_calibration_never_overshoots(schedule, target, delta):
    sigma = calibrate(schedule, SMALL, target_epsilon=target, delta=delta, accountant="rdp")
    assert sigma == calibrate_noise_multiplier(schedule.rescaled(77), SMALL, target_epsilon=target,
                                               delta=delta)
    spent = by_rdp(gaussian_events(schedule.rescaled(sigma), SMALL), delta)
    assert spent <= target
    assert (spent >= target*(1 - 1e-4)
            or by_rdp(gaussian_events(schedule.rescaled(sigma*(1 - 1e-6)), SMALL), delta) > target)


@steady
@given(st.floats(0.1, 5), st.floats(-8, 8).map(math.exp), st.floats(-3, 3).map(math.exp),
       st.floats(0, 1))
def test_smallest_scale_on_any_falling_function(power, centre, target, jump):
    def falling(s): return (centre/s)**power*(1 + jump*(s < centre))
    scale = smallest_scale(falling, target)
    assert falling(scale) <= target
    assert falling(scale) >= target*(1 - 1e-4) or falling(scale*(1 - 1e-8)) > target


def test_rdp_of_ten_phases_is_quick():
    events = gaussian_events(STEP.rescaled(1.906), MAIN)
    def once():
        start = time.process_time()
        by_rdp(events)
        return time.process_time() - start
    assert min(once() for _ in range(7)) < 0.05
