"What an epsilon means: against riskcal, integrals, closed forms, attacks, and in its limits."
import json
import math
import re
import time
from dataclasses import asdict

import numpy as np
import pytest
from scipy import integrate, special

from dp_companion.budgets.certified import _composed, budget_report, calibrate, certify
from dp_companion.budgets.events import MechanismEvent, gaussian_events
from dp_companion.budgets.risk import (
    FALSE_POSITIVE_RATES, SMALLEST_RATE, Target, TradeOff, risk_of, trade_off)
from dp_companion.budgets.schedules import Constant, LinearDecay, PoissonPlan, StepDecay

ALPHAS = np.r_[0, np.geomspace(1e-7, .5, 200), 1 - np.geomspace(1e-7, .5, 200)[::-1], 1]
MNIST = PoissonPlan(dataset_size=60000, expected_batch_size=64, epochs=100)
STEP = StepDecay(initial=17.98, decay_rate=.5, drop_every=10)


def event(sigma, q, steps):
    return MechanismEvent(noise_multiplier=sigma, sample_rate=q, steps=steps)


def gaussian_curve(mu, alpha):
    return special.ndtr(-special.ndtri(alpha) - mu)


# ---- another library

def mechanisms():
    "50 runs of one or two events, from hardly private to hardly visible; the same every time."
    draw = np.random.default_rng(42)
    for i in range(50):
        sigma, q, steps = draw.uniform(.6, 6), 10**draw.uniform(-3, 0), 10**draw.uniform(0, 3.5)
        one = event(float(sigma), float(q), int(steps))
        sigma, q, steps = draw.uniform(2, 20), draw.uniform(.01, 1), draw.integers(1, 20)
        two = event(float(sigma), float(q), int(steps))
        yield [one, two] if i % 3 == 0 else [one]


@pytest.mark.slow
def test_riskcal_says_the_same():
    analysis = pytest.importorskip("riskcal").analysis
    rates = np.r_[1e-3, 1e-2, np.linspace(.05, .95, 19)]
    worst = 0.0
    for events in mechanisms():
        ours = trade_off(events)
        scale = max(1e-5, min(1e-3, 1e-3*ours.mu_and_gap()[0]))
        theirs = _composed(events, scale, "add_or_remove_one")
        far = [np.abs(ours(rates) - analysis.get_beta_from_pld(theirs, alpha=rates)).max(),
               abs(ours.advantage - analysis.get_advantage_from_pld(theirs)),
               abs(ours.bayes_risk(.3) - analysis.get_bayes_risk_from_pld(theirs, .7))]
        worst = max(worst, *far)
        assert max(far) < 1e-3, (events, far)
    print(f"largest difference from riskcal: {worst:.1e}")


@pytest.mark.slow
@pytest.mark.parametrize("events", [
    [event(.8, .05, 20)], [event(1.2, .02, 50), event(8, .1, 10)], [event(5, .5, 200)]])
def test_dp_accounting_says_the_same(events):
    curve, theirs = trade_off(events), _composed(events, 1e-4, "add_or_remove_one")
    for epsilon in (0, .1, .5, 1, 2):
        ours = np.interp(math.exp(epsilon), np.exp(curve.epsilons), curve.deltas)
        delta = theirs.get_delta_for_epsilon(epsilon)
        assert delta - 1e-5 < ours < delta + 1e-7 # its grid is the coarser one


# ---- from first principles

@pytest.mark.parametrize(("sigma", "q"), [(1, .3), (.6, .02), (3, .9), (1, 1)])
def test_one_step_from_its_densities(sigma, q):
    "Both curves by thresholds on the output, and their convex hull by brute force."
    outputs = np.linspace(-8*sigma, 1 + 8*sigma, 10_001)
    absent = special.ndtr(-outputs/sigma)
    present = (1 - q)*absent + q*special.ndtr((1 - outputs)/sigma)
    slopes = np.exp(np.r_[np.linspace(0, .1, 1000), np.linspace(.1, 9, 2000)])
    removing = [(1 - present + s*absent).min() for s in slopes] # best weighted error, one direction
    adding = [(absent + s*(1 - present)).min() for s in slopes]
    lowest, rising = np.minimum(removing, adding)[:, None], slopes[:, None]
    lines = np.maximum(lowest - rising*ALPHAS, (lowest - ALPHAS)/rising)
    hull = np.maximum(0, lines.max(axis=0))
    ours = trade_off([event(sigma, q, 1)])
    np.testing.assert_allclose(ours(ALPHAS), hull, atol=1e-5)
    for weight in (1, 3, 30): # where the slope is one of theirs, the two are equal
        exact = min((1 - present + weight*absent).min(), (absent + weight*(1 - present)).min())
        alpha, beta = ours.corners
        np.testing.assert_allclose((beta + weight*alpha).min(), exact, atol=1e-6)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_special", "replace_one"])
@pytest.mark.parametrize("mu", [.003, .3, 2, 5.5])
def test_exact_gaussians(mu, relation):
    seen = mu*(2 if relation == "replace_one" else 1)
    if seen > 6: pytest.skip("the curve is below what can be seen")
    curve = trade_off([event(10/mu, 1, 60), event(10/mu, 1, 40)], neighbouring_relation=relation)
    under = gaussian_curve(seen, ALPHAS) - curve(ALPHAS)
    assert -1e-15 <= under.min() and under.max() < 1e-6
    np.testing.assert_allclose(curve.mu_and_gap(), (seen, 0), atol=1e-6)
    np.testing.assert_allclose(curve.advantage, 2*special.ndtr(seen/2) - 1, atol=1e-6)


def test_nearly_full_participation_is_nearly_gaussian():
    "Nothing is merged here: 10,000 steps go through the transform."
    curve = trade_off([event(100, 1 - 1e-9, 10_000)])
    under = gaussian_curve(1, ALPHAS) - curve(ALPHAS)
    assert -1e-8 < under.min() and under.max() < 1e-6


def test_an_attack_that_is_run_stays_below():
    "The likelihood-ratio test on simulated runs must reach the curve, and not pass it."
    draw, sigma, q, steps, runs = np.random.default_rng(0), 1.0, .1, 25, 40_000
    def log_ratio(x): return np.log1p(q*np.expm1((2*x - 1)/(2*sigma**2))).sum(axis=1)
    noise = draw.normal(0, sigma, (2, runs, steps))
    without, with_it = log_ratio(noise[0]), log_ratio(noise[1] + (draw.random((runs, steps)) < q))
    curve = trade_off([event(sigma, q, steps)])
    for alpha in (.01, .1, .5):
        power = (with_it > np.quantile(without, 1 - alpha)).mean()
        inverse = (without < np.quantile(with_it, alpha)).mean() # says "not there"
        bound, error = curve.true_positive_rate(alpha), 4*math.sqrt(.25/runs)*(1 + .1/alpha)
        assert max(power, inverse) <= bound + error
        assert alpha > .2 or power >= bound - error # around one half the hull is above both


# ---- order and limits

@pytest.mark.parametrize("events", [
    [event(1, .01, 1)], [event(.5, .2, 300)], [event(20, .5, 10_000)],
    gaussian_events(STEP, MNIST)])
def test_it_is_a_trade_off_function(events):
    curve = trade_off(events)
    alpha, beta = curve.corners
    assert (np.diff(alpha) >= -1e-15).all() and (np.diff(beta) <= 1e-15).all()
    middle = (ALPHAS[:-1] + ALPHAS[1:])/2
    assert (curve(middle) <= (curve(ALPHAS[:-1]) + curve(ALPHAS[1:]))/2 + 1e-12).all() # convex
    assert (curve(ALPHAS) <= 1 - ALPHAS + 1e-15).all() # no worse than guessing
    some = ALPHAS[1:200]
    np.testing.assert_allclose(curve(curve(some)), some, atol=1e-7) # its own inverse


@pytest.mark.slow
def test_epsilon_can_be_read_from_the_curve():
    for events in ([event(1.5, .02, 300)], [event(5, .5, 200)]):
        curve = trade_off(events)
        pld = certify(events, delta=1e-5, accountants=("pld",))["pld"].epsilon
        by_curve = np.interp(-1e-5, -curve.deltas, curve.epsilons)
        np.testing.assert_allclose(by_curve, pld, rtol=1e-3)


def test_order_of_events_does_not_matter():
    events = [event(.9, .01, 40), event(3, .3, 10), event(7, 1, 5)]
    curve = trade_off(events)
    np.testing.assert_allclose(curve(ALPHAS), trade_off(events[::-1])(ALPHAS), atol=1e-12)
    halves = [event(.9, .01, 20), *events, event(.9, .01, 20)][1:]
    assert (trade_off(halves)(ALPHAS) <= curve(ALPHAS) + 1e-9).all()


@pytest.mark.parametrize(("events", "advantage"), [
    ([event(1e-4, .1, 5)], 1 - .9**5), ([event(.01, .01, 100)], 1 - .99**100), ([], 0),
    ([event(1e-200, .1, 5)], 1 - .9**5), ([event(1e200, 1, 9)], 0),
    ([event(1e-3, 1, 1)], 1), ([event(1e5, 1e-6, 3)], 0), ([event(1e-3, .5, 10_000)], 1)])
def test_extremes(events, advantage):
    with np.errstate(all="raise", under="ignore"):
        found = risk_of(events)
    np.testing.assert_allclose(found.advantage, advantage, atol=2e-9)
    for rate, tpr in found.true_positive_rate.items(): assert rate - 1e-12 <= tpr <= 1
    assert (found.mu == math.inf) == (advantage > 1 - 1e-9) or advantage not in (0, 1)


def test_a_smaller_mu_does_not_hold():
    for events in ([event(1, .01, 1)], [event(.8, .05, 20)], [event(5, .5, 200)]):
        curve, rates = trade_off(events), np.geomspace(SMALLEST_RATE, .5, 4000)
        mu, gap = curve.mu_and_gap()
        assert (gaussian_curve(mu, rates) <= curve(rates) + 1e-12).all()
        assert (gaussian_curve(.999*mu, rates) > curve(rates)).any()
        by_hand = (curve(ALPHAS) - gaussian_curve(mu, ALPHAS)).max()
        np.testing.assert_allclose(gap, by_hand, atol=1e-3)


def test_reconstruction_is_above_what_is_reached():
    "k records in orthogonal directions, told apart as well as can be."
    for mu in (.5, 2):
        for k in (2, 10, 100):
            def right(x):
                return math.exp(-(x - mu)**2/2)/math.sqrt(2*math.pi)*special.ndtr(x)**(k - 1)
            bound = trade_off([event(1/mu, 1, 1)]).reconstruction(k)
            assert 1/k < integrate.quad(right, -10, mu + 10)[0] < bound


# ---- the public face

def test_a_report_is_plain_numbers():
    found = risk_of([event(1.5, .02, 300)], base_rate=.1, candidates=100)
    plain = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert tuple(map(float, plain["true_positive_rate"])) == FALSE_POSITIVE_RATES
    assert plain["bayes_risk"] <= .1
    assert plain["reconstruction"] == plain["true_positive_rate"]["0.01"]
    assert "mu = " in str(found) and "10%" in str(found)
    curve = trade_off([event(1.5, .02, 300)])
    assert risk_of(curve, base_rate=.1, candidates=100) == found


@pytest.mark.parametrize("schedule", [STEP, STEP.rescaled(.1916), Constant(initial=1.401)])
def test_ten_phases_within_a_second(schedule):
    events = gaussian_events(schedule, MNIST)
    risk_of(events)
    start = time.process_time() # of one processor, whatever else runs
    risk_of(events)
    assert time.process_time() - start < 1


@pytest.mark.slow
def test_a_hundred_phases():
    found = risk_of(gaussian_events(LinearDecay(initial=3, decay_rate=.98), MNIST))
    assert .08 < found.advantage < .1 and found.gap < .01


@pytest.mark.slow
@pytest.mark.parametrize("target", [
    {"true_positive_rate": .05}, {"true_positive_rate": .011}, {"advantage": .3}, {"mu": .4},
    {"true_positive_rate": .1, "false_positive_rate": 1/256}])
def test_calibration_meets_the_risk(target):
    plan = PoissonPlan(dataset_size=1000, expected_batch_size=20, epochs=2)
    shape = Constant(initial=1)
    sigma = calibrate(shape, plan, target=Target(**target))
    curve = trade_off(gaussian_events(shape.rescaled(sigma), plan))
    false = target.get("false_positive_rate", .01)
    gain = float(curve.true_positive_rate(false)) - false
    mu = curve.mu_and_gap()[0]
    reached = {"true_positive_rate": gain, "advantage": curve.advantage, "mu": mu}
    name = next(iter(target))
    largest = target[name] - (false if name == "true_positive_rate" else 0)
    assert largest*(1 - 5e-4) <= reached[name] <= largest


def test_any_lines_are_a_bound():
    "A curve from lines that cross below the diagonal is still below each mirrored pair."
    curve = TradeOff(np.array([0, .1, .7]), np.array([.5, .46, .3]))
    slopes, free = np.exp(curve.epsilons)[:, None], 1 - curve.deltas[:, None]
    lines = np.maximum(free - slopes*ALPHAS, (free - ALPHAS)/slopes)
    assert (curve(ALPHAS) <= np.maximum(0, lines.max(axis=0)) + 1e-12).all()


def test_a_model_card_names_the_rates_of_its_mu():
    report = budget_report([event(1.591, .05, 40)], delta=1e-5)
    said = re.search(r"μ = (\S+), at error rates of (\S+) or more", report.statement())
    mu, limit = map(float, said.groups())
    curve = trade_off(report.events)
    assert limit == SMALLEST_RATE and mu == pytest.approx(report.risk.mu, rel=2e-3)
    assert curve(SMALLEST_RATE) >= gaussian_curve(report.risk.mu, SMALLEST_RATE)*(1 - 1e-9)
    assert curve(SMALLEST_RATE/100) < gaussian_curve(report.risk.mu, SMALLEST_RATE/100) - 1e-9
