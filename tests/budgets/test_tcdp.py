"tCDP: oracles that share no code, properties and limits."
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr, ndtr

from dp_companion.budgets.tcdp import (TCDP, amplify_by_sampling, compose_tcdp,
                                       conversion_preconditions, epsilon_to_rho, gaussian_tcdp,
                                       tcdp_to_epsilon)

properties = settings(derandomize=True, max_examples=80, deadline=None)
logs = lambda low, high: st.floats(math.log(low), math.log(high)).map(math.exp)
rhos = logs(1e-6, 100)
deltas = logs(1e-12, 0.5)
omegas = st.one_of(logs(1e-2, 1e4).map(lambda x: 1 + x), st.just(math.inf))


def exact_delta(epsilon, rho):
    "Balle and Wang 2018, Theorem 8."
    sigma = 1/math.sqrt(2*rho)
    return (ndtr(1/(2*sigma) - epsilon*sigma)
            - math.exp(epsilon + log_ndtr(-1/(2*sigma) - epsilon*sigma)))


@properties
@given(rhos, omegas, deltas)
def test_conversion_is_the_least_over_orders(rho, omega, delta):
    epsilon = lambda x: rho*(1 + math.exp(x)) - math.log(delta)/math.exp(x)
    least = minimize_scalar(epsilon, bounds=(-30, min(30, math.log(omega - 1))), method="bounded",
                            options={"xatol": 1e-10}).fun
    # the search stops short of the end of an interval
    assert least*(1 - 1e-6) <= tcdp_to_epsilon(rho, omega, delta=delta) <= least*(1 + 1e-12)


@properties
@given(rhos, omegas, deltas)
def test_conversion_is_never_below_the_exact_gaussian(rho, omega, delta):
    assert exact_delta(tcdp_to_epsilon(rho, omega, delta=delta), rho) <= delta


@properties
@given(logs(1e-6, 100), omegas, deltas)
def test_inverse(epsilon, omega, delta):
    assume(epsilon > -math.log(delta)/(omega - 1)*1.001)
    assert tcdp_to_epsilon(epsilon_to_rho(epsilon, omega, delta=delta), omega,
                           delta=delta) == pytest.approx(epsilon, rel=1e-11)


@properties
@given(rhos, omegas, deltas)
def test_conversion_is_monotone(rho, omega, delta):
    epsilon = tcdp_to_epsilon(rho, omega, delta=delta)
    assert tcdp_to_epsilon(rho*1.01, omega, delta=delta) > epsilon
    assert tcdp_to_epsilon(rho, 1 + (omega - 1)*1.01, delta=delta) <= epsilon*(1 + 1e-12)
    assert tcdp_to_epsilon(rho, omega, delta=delta*1.01) < epsilon
    assert (conversion_preconditions(TCDP(rho, omega), delta=delta)[1].holds
            == (epsilon <= tcdp_to_epsilon(rho, delta=delta)*(1 + 1e-13)))


def test_the_counterexample_of_a_mistaken_conversion():
    assert tcdp_to_epsilon(4, 20, delta=1e-5) == pytest.approx(4 + 2*math.sqrt(4*math.log(1e5)))
    assert exact_delta(11.88, 4) > 1e-5 # what the mistaken formula reports there
    assert exact_delta(15.46, 4) == pytest.approx(1e-5, rel=0.02)


@pytest.mark.parametrize("sigma", [0.7, 1.0, 4.0])
@pytest.mark.parametrize("sensitivity", [1, 2])
@pytest.mark.parametrize("alpha", [1.01, 2, 5.5])
def test_gaussian_is_its_integral(sigma, sensitivity, alpha):
    log_density = lambda z, mean: -(z - mean)**2/(2*sigma**2) - math.log(sigma*math.sqrt(2*math.pi))
    integrand = lambda z: math.exp(alpha*log_density(z, sensitivity)
                                   + (1 - alpha)*log_density(z, 0))
    centre = alpha*sensitivity
    integral = quad(integrand, centre - 15*sigma, centre + 15*sigma, epsabs=0, epsrel=1e-12,
                    points=[centre])[0]
    assert (gaussian_tcdp(sigma, sensitivity=sensitivity).rho*alpha
            == pytest.approx(math.log(integral)/(alpha - 1), rel=1e-6))


def test_composition():
    assert compose_tcdp([TCDP(1.0, 5), TCDP(2.0, 3)]) == TCDP(3.0, 3)
    assert compose_tcdp([]) == TCDP(0.0) and tcdp_to_epsilon(0.0, delta=1e-5) == 0
    assert compose_tcdp(TCDP(0.1, 7) for _ in range(10)).rho == 1.0 # no rounding left over


def mixture_divergence(alpha, sigma, h):
    "D_alpha of (1-h) N(0) + h N(1) from N(0), by the trapezoidal rule for (1+u)^alpha."
    z, step = np.linspace(-14*sigma, alpha + 14*sigma, 40_001, retstep=True)
    u = h*np.expm1((2*z - 1)/(2*sigma**2))
    excess = np.where(np.abs(u) < 1e-4, alpha*(alpha - 1)/2*u**2*(1 + (alpha - 2)/3*u),
                      np.expm1(alpha*np.log1p(u)) - alpha*u)
    return (math.log1p((excess*np.exp(-z**2/(2*sigma**2))).sum()*step/(sigma*math.sqrt(2*math.pi)))
            /(alpha - 1))


@pytest.mark.parametrize("h", [0.1, 0.01, 64/60000])
@pytest.mark.parametrize("rho", [0.1, 0.01])
def test_amplification_holds_where_its_preconditions_do(h, rho):
    amplified, preconditions = amplify_by_sampling(TCDP(rho), h)
    assert all(p.holds for p in preconditions)
    assert (amplified.rho, amplified.omega) == (pytest.approx(13*h**2*rho),
                                                pytest.approx(-math.log(h)/(4*rho)))
    for alpha in (1.01, 1.5, min(20, 0.99*amplified.omega)):
        assert 0 < mixture_divergence(alpha, 1/math.sqrt(2*rho), h) <= amplified.rho*alpha


def test_amplification_fails_where_a_precondition_does():
    amplified, preconditions = amplify_by_sampling(TCDP(3.0), 1e-6)
    assert [p.holds for p in preconditions] == [False, True, True, True]
    assert amplified.omega > 1.1
    assert mixture_divergence(1.1, 1/math.sqrt(6), 1e-6) > 4*amplified.rho*1.1


def test_each_sampling_precondition_can_fail():
    failing = (lambda guarantee,
               h: [i for i, p in enumerate(amplify_by_sampling(guarantee, h)[1]) if not p.holds])
    assert failing(TCDP(0.2), 0.01) == [0]
    assert failing(TCDP(0.01), 0.2) == [1]
    assert failing(TCDP(1.0), 0.1) == [0, 2]
    assert failing(TCDP(0.1, 2), 0.1) == [3]
