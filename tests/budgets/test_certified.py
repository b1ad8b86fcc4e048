"RDP and PLD certificates: between bounds, monotone, pessimistic, never overshooting."
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dp_companion.budgets.certified import (BudgetReport, Certified, budget_report, calibrate,
                                            certify, pld_epsilon)
from dp_companion.budgets.decayed import claimed_budget
from dp_companion.budgets.events import MechanismEvent, gaussian_events
from dp_companion.budgets.rdp import rdp_of_events, rdp_sampled_gaussian, rdp_to_epsilon
from dp_companion.budgets.schedules import Constant, PoissonPlan, StepDecay

steady = settings(derandomize=True, deadline=None, max_examples=25)
MAIN = PoissonPlan(dataset_size=60000, expected_batch_size=64, epochs=100)
SMALL = PoissonPlan(dataset_size=1000, expected_batch_size=50, epochs=6)
STEP = StepDecay(initial=1, decay_rate=0.5, drop_every=10)


def event(sigma, q=0.01, steps=1, query="gradient"):
    return MechanismEvent(noise_multiplier=sigma, sample_rate=q, steps=steps, query=query)


def by_rdp(events, delta=1e-5): return rdp_to_epsilon(rdp_of_events(events), delta=delta).epsilon


def by_pld(events, delta=1e-5, **kwargs):
    return certify(events, delta=delta, accountants=("pld",), **kwargs)["pld"].epsilon


def test_pld_epsilon_is_monotone():
    def by_pld(events, delta=1e-5): return pld_epsilon(events, delta=delta, interval=1e-3)
    base = dict(sigma=1.0, q=0.02, steps=400)
    here, grid = by_pld([event(**base)]), 0.01
    for change, up in [(dict(sigma=0.9), True), (dict(sigma=1.1), False), (dict(q=0.025), True),
                       (dict(q=0.015), False), (dict(steps=500), True), (dict(steps=300), False)]:
        there = by_pld([event(**(base | change))])
        assert (there > here + grid) if up else (there < here - grid), change
    assert by_pld([event(**base)], 1e-6) > here > by_pld([event(**base)], 1e-4)
    assert by_pld([event(**base), event(5, 0.1, 50, "count")]) > here


@settings(steady, max_examples=12)
@given(st.floats(math.log(0.05), math.log(30)).map(math.exp),
       st.floats(math.log(1e-4), 0).map(math.exp), st.integers(1, 3000),
       st.sampled_from([1e-3, 1e-5, 1e-8, 1e-12]))
def test_pld_at_most_rdp(sigma, q, steps, delta):
    got = certify([event(sigma, q, steps), event(2*sigma, q, steps)], delta=delta)
    assert 0 <= got["pld"].epsilon <= got["rdp"].epsilon
    assert got["rdp"].accountant == "rdp" and (got["pld"].accountant == "pld" or got["pld"].note)


@pytest.mark.slow
def test_pld_between_its_own_bounds():
    from dp_companion.budgets.certified import _composed
    events = [event(0.8, 0.05, 20), event(4, 0.1, 5, "count")]
    low = _composed(events, 1e-4, "add_or_remove_one",
                    pessimistic=False).get_epsilon_for_delta(1e-5)
    assert low <= by_pld(events) <= low + 30e-4


def test_no_steps_cost_nothing_and_much_noise_next_to_nothing():
    for events in ((), [event(1, 0.1, 0)]):
        assert {c.epsilon for c in certify(events, delta=1e-5).values()} == {0.0}
    assert by_rdp([event(1e6, 0.5, 100)]) == by_pld([event(1e6, 0.5, 100)]) == 0.0
    assert by_rdp([event(30, 0.001, 1)]) < 0.01


@pytest.mark.parametrize("sigma", [1e-3, 1e-4, 1e-8])
def test_tiny_noise_falls_back_and_says_so(sigma):
    got = certify([event(sigma, 64/60000, 1000)], delta=1e-5)
    assert got["pld"].accountant == "rdp"
    assert "RDP" in got["pld"].note
    assert got["pld"].epsilon == got["rdp"].epsilon < math.inf


def test_order_and_splitting_do_not_matter():
    events = [event(1, 0.01, 300), event(5, 0.1, 40, "count"), event(0.7, 0.01, 20)]
    other = [event(0.7, 0.01, 20), event(1, 0.01, 100), event(5, 0.1, 40, "count"),
             event(1, 0.01, 200)]
    np.testing.assert_allclose(by_rdp(events), by_rdp(other), rtol=1e-12)
    np.testing.assert_allclose(*[pld_epsilon(e, delta=1e-5, interval=1e-3)
                                 for e in (events, other)], rtol=1e-6)


def test_known_values_of_the_main_schedule():
    for sigma, rdp, pld in [(0.1916, 282_000, 263_000), (1.906, 2_340, 2_165)]:
        got = certify(gaussian_events(STEP.rescaled(sigma), MAIN), delta=1e-5)
        assert abs(got["rdp"].epsilon/rdp - 1) < 3e-3 and abs(got["pld"].epsilon/pld - 1) < 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("schedule, target, relation", [
    (StepDecay(initial=2, decay_rate=0.5, drop_every=2), 8,
     "add_or_remove_one"), (Constant(initial=1), 1, "replace_one")])
def test_pld_calibration_never_overshoots(schedule, target, relation):
    sigma = calibrate(schedule, SMALL, target_epsilon=target, delta=1e-5, accountant="pld",
                      neighbouring_relation=relation)
    assert target*(1 - 6e-4) <= by_pld(gaussian_events(schedule.rescaled(sigma), SMALL),
                                       neighbouring_relation=relation) <= target


@pytest.mark.slow
def test_a_steep_decay_is_no_query_of_fixed_noise():
    steep = StepDecay(initial=1, decay_rate=1e-19, drop_every=3)
    sigma = calibrate(steep, SMALL, target_epsilon=1, delta=1e-5)
    assert .999 < by_pld(gaussian_events(steep.rescaled(sigma), SMALL)) <= 1


@pytest.mark.slow
def test_any_events_are_calibrated_as_their_schedule():
    def events_of(sigma): return gaussian_events(STEP.rescaled(sigma), SMALL)
    for accountant in ("rdp", "pld"):
        by = dict(target_epsilon=2, delta=1e-5, accountant=accountant)
        assert calibrate(events_of, **by) == calibrate(STEP, SMALL, **by)


def test_claimed_calibration():
    derived = calibrate(STEP, MAIN, target_epsilon=3, delta=1e-5, accountant="tcdp")
    assert claimed_budget(STEP.rescaled(derived), MAIN, delta=1e-5,
                          formula="as_derived").epsilon <= 3*(1 + 1e-9)
    assert (f"{calibrate(STEP, MAIN, target_epsilon=1, delta=1e-5, accountant='as_printed'):.4f}"
            == "0.1916")
    assert by_pld(gaussian_events(STEP.rescaled(derived), MAIN)) <= 3


MAIN_TARGET = dict(target_epsilon=1, delta=1e-5)
RUN = [event(1, 0.01, 10)]


@pytest.mark.parametrize("call, message", [
    (lambda: rdp_sampled_gaussian(0, 0.1, [2]),
     "noise_multiplier must be finite and > 0, got noise_multiplier=0"),
    (lambda: rdp_sampled_gaussian(math.nan, 0.1, [2]),
     "noise_multiplier must be finite and > 0, got noise_multiplier=nan"),
    (lambda: rdp_sampled_gaussian(1, 0, [2]),
     "sample_rate must be in (0, 1], got sample_rate=0"),
    (lambda: rdp_sampled_gaussian(1, 0.1, [2, 1]),
     "orders must be one row of finite numbers > 1"),
    (lambda: rdp_sampled_gaussian(1, 0.1, []),
     "orders must be one row of finite numbers > 1"),
    (lambda: rdp_to_epsilon([1, 2], [2, 3], delta=0),
     "delta must be in (0, 1), got delta=0"),
    (lambda: rdp_to_epsilon([1, -2], [2, 3], delta=0.1),
     "rdp must be 2 values >= 0"),
    (lambda: certify(RUN, delta=math.nan),
     "delta must be in (0, 1), got delta=nan"),
    (lambda: certify(RUN, delta=1e-5, accountants=("moments",)),
     "accountants must be one of rdp, pld, got accountants=moments"),
    (lambda: certify(RUN, delta=1e-5, neighbouring_relation="replace_one"),
     "neighbouring_relation must be add_or_remove_one or replace_special "
     "for accountant=rdp, got neighbouring_relation=replace_one"),
    (lambda: certify(RUN, delta=1e-5, accountants=("pld",),
                     neighbouring_relation="swap"),
     "neighbouring_relation must be one of"),
    (lambda: pld_epsilon(RUN, delta=1e-13, interval=1e-3),
     "delta must be in [1e-10, 1) for accountant=pld"),
    (lambda: calibrate(STEP, MAIN, target_epsilon=0, delta=1e-5),
     "target_epsilon must be finite and > 0, got target_epsilon=0"),
    (lambda: calibrate(STEP, MAIN, target_epsilon=1, delta=1),
     "delta must be in (0, 1), got delta=1"),
    (lambda: calibrate(STEP, MAIN, accountant="prv", **MAIN_TARGET),
     "accountant must be one of rdp, pld, tcdp, as_printed, got "
     "accountant=prv"),
    (lambda: calibrate(STEP, MAIN, accountant="rdp", neighbouring_relation="replace_one",
                       **MAIN_TARGET), "for accountant=rdp"),
    (lambda: calibrate(STEP, MAIN, accountant="as_printed",
                       neighbouring_relation="replace_one", **MAIN_TARGET),
     "for accountant=as_printed"),
    (lambda: BudgetReport(certified={}, delta=1e-5, privacy_unit=""),
     "privacy_unit must be a name"),
    (lambda: BudgetReport(certified={"gdp": Certified(1.0, "gdp")},
                          delta=1e-5), "certified must be one of rdp, pld")])
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_report_is_json():
    schedule = STEP.rescaled(0.1916)
    report = budget_report(gaussian_events(schedule, MAIN), delta=1e-5, accountants=("rdp",),
                           claimed=claimed_budget(schedule, MAIN, delta=1e-5), empirical=2.5,
                           privacy_unit="image")
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert {"claimed", "certified", "empirical", "delta", "neighbouring_relation", "privacy_unit",
            "events", "verdict"} <= set(plain)
    assert {"rho", "omega", "epsilon", "preconditions"} <= set(plain["claimed"])
    assert {"name", "value", "bound", "holds"} <= set(plain["claimed"]["preconditions"][0])
    assert plain["events"][0] == {"noise_multiplier": 0.1916, "sample_rate": 64/60000,
                                  "steps": sum(MAIN.steps_per_epoch[:10]), "query": "gradient"}
    assert plain["privacy_unit"] == "image"
    assert "refuted" in plain["verdict"]
    assert plain["certified"]["rdp"]["epsilon"] == report.epsilon


@pytest.mark.slow
@pytest.mark.parametrize("target, step_rdp, step_pld, constant_pld", [
    (3, 14.24, 13.17, 0.763), (8, 10.80, 10.31, 0.565)])
def test_multipliers_for_paper_global_adapt_v2(target, step_rdp, step_pld, constant_pld):
    "Reference values computed apart from this package, on other grids."
    plan = PoissonPlan(dataset_size=60000, expected_batch_size=64, epochs=100)
    step, constant = StepDecay(initial=1, decay_rate=0.5, drop_every=10), Constant(initial=1)
    for schedule, accountant, reference in ((step, "rdp", step_rdp), (step, "pld", step_pld),
                                            (constant, "pld", constant_pld)):
        sigma = calibrate(schedule, plan, target_epsilon=target, delta=1e-5, accountant=accountant)
        assert sigma == pytest.approx(reference, rel=2e-3)
        assert certify(gaussian_events(schedule.rescaled(sigma), plan),
                       delta=1e-5)[accountant].epsilon <= target


@pytest.mark.parametrize("call, sentence", [
    (lambda: certify(MAIN, delta=1e-5),
     "events must be MechanismEvents, such as those of "
     "gaussian_events.*, got a PoissonPlan"),
    (lambda: certify([STEP], delta=1e-5), "got a StepDecay"),
    (lambda: budget_report(1., delta=1e-5), "got a float"),
    (lambda: gaussian_events(MAIN, STEP),
     "schedule must be a Schedule and plan a PoissonPlan, in this "
     "order, got a PoissonPlan and a StepDecay")])
def test_what_is_no_event_is_said_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
