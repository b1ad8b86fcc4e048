"tCDP and the decayed budgets: oracles that share no code, the paper's printed numbers, properties and faults."
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr, ndtr

from dp_companion.budgets.decayed import FIGURE_9_READING, _FORMULAS, calibrate_claimed, claimed_budget, _precision_sum, _smallest_variance
from dp_companion.budgets.schedules import Constant, LinearDecay, PoissonPlan, StepDecay, TimeDecay
from dp_companion.budgets.tcdp import TCDP, amplify_by_sampling, compose_tcdp, conversion_preconditions, epsilon_to_rho, gaussian_tcdp, tcdp_to_epsilon

properties = settings(derandomize=True, max_examples=80, deadline=None)
MNIST = PoissonPlan(dataset_size=60000, expected_batch_size=64, epochs=100)
HEADLINE = StepDecay(initial=0.1916, decay_rate=0.5, drop_every=10)
SHAPES = [Constant(initial=1.0), LinearDecay(initial=1.0, decay_rate=0.99),
          TimeDecay(initial=1.0, decay_rate=0.01), HEADLINE]

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
    "D_alpha of (1-h) N(0) + h N(1) from N(0), from E[(1+u)^alpha - 1 - alpha u] with E[u] = 0, by the trapezoidal rule."
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


@properties
@given(st.floats(0.2, 0.9999), st.integers(1, 30), st.integers(1, 10))
def test_closed_forms_are_direct_sums(rate, phases, drop_every):
    epochs = phases*drop_every
    direct = {Constant(initial=1.0): [1.0]*epochs,
              LinearDecay(initial=1.0, decay_rate=rate): [rate**e for e in range(epochs)],
              TimeDecay(initial=1.0, decay_rate=rate): [1/(1 + rate*e) for e in range(epochs)],
              StepDecay(initial=1.0, decay_rate=rate,
                        drop_every=drop_every): [rate**(e//drop_every) for e in range(epochs)]}
    for shape, variances in direct.items():
        assert _precision_sum(shape, epochs) == pytest.approx(math.fsum(1/v for v in variances),
            rel=1e-12)
        assert _smallest_variance(shape, epochs) == pytest.approx(min(variances), rel=1e-12)


@pytest.mark.parametrize("drop_every, decay_rate, printed",
                         [(5, 0.5, "8.6769"), (10, 0.5, "0.1916"), (20, 0.5, "0.0236"),
                          (25, 0.5, "0.0147"), (50, 0.5, "0.0046"), (10, 0.1, "199.7241"),
                          (10, 0.25, "3.5423"), (10, 0.75, "0.0425"), (10, 0.9, "0.0246")])
def test_tables_16_and_17_to_every_digit(drop_every, decay_rate, printed):
    shape = StepDecay(initial=1.0, decay_rate=decay_rate, drop_every=drop_every)
    assert f"{calibrate_claimed(shape, MNIST, target_epsilon=1, delta=1e-5):.4f}" == printed


def test_the_main_setting():
    printed, stated, derived = (claimed_budget(HEADLINE, MNIST, delta=1e-5, formula=formula)
                                for formula in _FORMULAS)
    assert (round(printed.rho, 4), round(stated.rho, 2)) == (0.0206, 2.06)
    assert printed.omega == stated.omega == pytest.approx(math.log(937.5)*0.1916**2*0.5**9/20,
                                                          rel=1e-12)
    assert derived.rho == pytest.approx(stated.rho*937.5, rel=1e-12)
    assert derived.omega == pytest.approx(stated.omega*10, rel=1e-12)
    assert printed.epsilon == pytest.approx(printed.rho + 2*math.sqrt(printed.rho*math.log(1e5)),
                                            rel=1e-12)
    assert derived.epsilon == math.inf and derived.unmet
    assert len({p.name for p in printed.preconditions}) == len(printed.preconditions) == 9
    assert claimed_budget(HEADLINE, MNIST, delta=1e-5,
                          sensitivity=2).rho == pytest.approx(4*printed.rho, rel=1e-12)


def test_preconditions_show_the_worst_release():
    worst = claimed_budget(HEADLINE, MNIST, delta=1e-5).preconditions[0]
    assert worst.value == pytest.approx(1/(2*0.1916**2*0.5**9), rel=1e-12) and not worst.holds
    near = claimed_budget(HEADLINE.rescaled(80.0), MNIST, delta=1e-5, formula="as_derived",
                          sensitivity=2)
    assert near.epsilon == math.inf
    assert [p.name for p in near.unmet] == ["rho of a release <= 0.1",
                                            "batches of one fixed size: sd of the batch size <= 0"]
    good = claimed_budget(HEADLINE.rescaled(120.0), MNIST, delta=1e-5, formula="as_derived",
                          sensitivity=2)
    assert 0 < good.epsilon < 1
    assert [p.name for p in good.unmet] == ["batches of one fixed size: sd of the batch size <= 0"]


def test_poisson_with_everybody_in_every_batch_has_one_size():
    full = PoissonPlan(dataset_size=10, expected_batch_size=10, epochs=1)
    assert claimed_budget(Constant(initial=5.0), full, delta=1e-5).preconditions[-2].holds


@properties
@given(st.sampled_from(SHAPES), st.sampled_from(_FORMULAS), logs(0.05, 20), logs(1e-9, 1e-3),
       st.sampled_from([1, 2]),
       st.sampled_from([MNIST, PoissonPlan(dataset_size=1173, expected_batch_size=32, epochs=30),
                        PoissonPlan(dataset_size=1000, expected_batch_size=100, epochs=10)]))
def test_calibration_round_trip(shape, formula, target, delta, sensitivity, plan):
    how = dict(delta=delta, formula=formula, sensitivity=sensitivity)
    initial = calibrate_claimed(shape, plan, target_epsilon=target, **how)
    epsilon = claimed_budget(shape.rescaled(initial), plan, **how).epsilon
    if formula != "as_derived":
        assert epsilon == pytest.approx(target, rel=1e-11)
    else:
        assert epsilon <= target < claimed_budget(shape.rescaled(initial*(1 - 1e-6)), plan,
                                                  **how).epsilon


def test_the_reading_is_used_where_the_paper_read_it_and_nowhere_else():
    rho = lambda target, delta, formula: claimed_budget(
        HEADLINE.rescaled(calibrate_claimed(HEADLINE, MNIST, target_epsilon=target, delta=delta,
                                            formula=formula)), MNIST, delta=delta,
        formula=formula).rho
    assert rho(1, 1e-5, "as_printed") == pytest.approx(FIGURE_9_READING, rel=1e-12)
    for target, delta, formula in ((1, 1e-5, "as_stated"), (1, 1e-3, "as_printed"),
                                   (3, 1e-5, "as_printed"), (1.001, 1e-5, "as_printed")):
        assert rho(target, delta, formula) == pytest.approx(epsilon_to_rho(target, delta=delta),
            rel=1e-12)


def test_derived_takes_any_schedule():
    plan = PoissonPlan(dataset_size=1797, expected_batch_size=64, epochs=7)
    by_step = StepDecay(initial=20.0, decay_rate=0.5, drop_every=50, unit="step")
    claim = claimed_budget(by_step, plan, delta=1e-5, formula="as_derived")
    multipliers = plan.per_step(by_step)
    assert claim.rho == pytest.approx(math.fsum(13*plan.sample_rate**2/(2*sigma**2)
                                                for sigma in multipliers), rel=1e-12)
    assert claim.omega == pytest.approx(-math.log(plan.sample_rate)*multipliers.min()**2/2,
                                        rel=1e-12)
    assert 0 < claim.epsilon < math.inf


@pytest.mark.parametrize("call, text",
                         [
                             (lambda: claimed_budget(HEADLINE,
                                                     PoissonPlan(dataset_size=600,
                                                         expected_batch_size=6, epochs=25),
                                                     delta=1e-5),
                              "epochs must be divisible by drop_every=10"),
                             (lambda: claimed_budget(HEADLINE, MNIST, delta=0.0),
                              "delta must be in (0, 1), got delta=0.0"),
                             (lambda: claimed_budget(HEADLINE, MNIST, delta=float("nan")),
                              "delta must be in (0, 1), got delta=nan"),
                             (lambda: claimed_budget(HEADLINE, MNIST, delta=1e-5, formula="hoped"),
                              "formula must be one of as_printed, as_stated, as_derived, got "
                              "formula=hoped"),
                             (lambda: claimed_budget(HEADLINE, MNIST, delta=1e-5, sensitivity=0),
                              "sensitivity must be finite and > 0, got sensitivity=0"),
                             (lambda: calibrate_claimed(HEADLINE, MNIST, target_epsilon=-1,
                                                        delta=1e-5),
                              "target_epsilon must be finite and > 0, got target_epsilon=-1"),
                             (lambda: calibrate_claimed(HEADLINE, MNIST,
                                                        target_epsilon=float("nan"), delta=1e-5),
                              "target_epsilon must be finite and > 0, got target_epsilon=nan"),
                             (lambda: tcdp_to_epsilon(1.0, 0.5, delta=1e-5),
                              "omega must be > 1 for a finite epsilon, got omega=0.5"),
                             (lambda: tcdp_to_epsilon(-1.0, delta=1e-5),
                              "rho must be >= 0, got rho=-1.0"),
                             (lambda: epsilon_to_rho(0.01, 2.0, delta=1e-5),
                              "epsilon must be > log(1/delta)/(omega - 1) = 11.5129 at omega=2.0, "
                              "got epsilon=0.01"),
                             (lambda: gaussian_tcdp(float("inf")),
                              "noise_multiplier must be finite and > 0, got noise_multiplier=inf"),
                             (lambda: amplify_by_sampling(TCDP(0.1), 0.0),
                              "sample_rate must be in (0, 1], got sample_rate=0.0"),
                             (lambda: TCDP(float("nan")), "rho must be >= 0, got rho=nan")])
def test_bad_input_is_one_sentence(call, text):
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value) and "\n" not in str(error.value)
