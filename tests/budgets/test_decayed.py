"Decayed budgets: the paper's printed numbers, closed forms, round trips."
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_companion.budgets.decayed import (FIGURE_9_READING, _FORMULAS, calibrate_claimed,
                                          claimed_budget, _precision_sum, _smallest_variance)
from dp_companion.budgets.schedules import Constant, LinearDecay, PoissonPlan, StepDecay, TimeDecay
from dp_companion.budgets.tcdp import (TCDP, amplify_by_sampling, epsilon_to_rho, gaussian_tcdp,
                                       tcdp_to_epsilon)

properties = settings(derandomize=True, max_examples=80, deadline=None)
MNIST = PoissonPlan(dataset_size=60000, expected_batch_size=64, epochs=100)
HEADLINE = StepDecay(initial=0.1916, decay_rate=0.5, drop_every=10)
SHAPES = [Constant(initial=1.0), LinearDecay(initial=1.0, decay_rate=0.99),
          TimeDecay(initial=1.0, decay_rate=0.01), HEADLINE]
logs = lambda low, high: st.floats(math.log(low), math.log(high)).map(math.exp)


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


@pytest.mark.parametrize("drop_every, decay_rate, printed", [
    (5, 0.5, "8.6769"), (10, 0.5, "0.1916"), (20, 0.5, "0.0236"),
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


def test_the_reading_is_used_only_where_the_paper_read_it():
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


@pytest.mark.parametrize("call, text", [
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
