"Privacy filters: adaptive choices never overspend."
import json
import math
import time

import numpy as np
import pytest

from dp_companion.budgets.certified import calibrate, certify
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.filters import (RenyiFilter, RenyiOdometer, _order_offsets,
                                          planned_orders, same_batch)
from dp_companion.budgets.outputs import gaussian_delta
from dp_companion.budgets.rdp import ORDERS, rdp_of_events, rdp_to_epsilon
from dp_companion.budgets.schedules import Constant, PoissonPlan

HAM = PoissonPlan(dataset_size=8012, expected_batch_size=128, epochs=50)


def step(noise_multiplier, sample_rate=0.01, steps=1):
    return MechanismEvent(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)


def test_constant_noise_stops_where_the_accountant_does():
    for target, delta in ((0.5, 1e-5), (3, 1e-3), (10, 1e-6)):
        sigma = calibrate(Constant(initial=1), HAM, target_epsilon=target, delta=delta,
                          accountant="rdp")
        budget = RenyiFilter.planned(HAM, target_epsilon=target, delta=delta)
        assert budget.steps_left(sigma, sample_rate=HAM.sample_rate) >= HAM.steps
        assert budget.request(step(sigma, HAM.sample_rate, HAM.steps))
        fixed = certify(budget.events, delta=delta, accountants=("rdp",))["rdp"].epsilon
        np.testing.assert_allclose(budget.spent, fixed, rtol=1e-10)
        assert budget.left < 1e-3*target and not budget.allows(step(0.5, HAM.sample_rate, 50))


@pytest.mark.slow
def test_ten_thousand_adversaries_never_overspend():
    rng = np.random.default_rng(10)
    pool = [(float(s), float(q)) for s in np.geomspace(0.3, 50, 24) for q in (0.002, 0.016, 0.2, 1)]
    curves = np.array([rdp_of_events([step(*pair)]) for pair in pool])
    saved = [RenyiFilter.planned(HAM, target_epsilon=e, delta=d, spread=spread).to_dict()
             for e in (0.3, 2, 8, 40) for d in (1e-2, 1e-5, 1e-9) for spread in (0, 0.2)]
    spent = []
    for run in range(10_000):
        budget = RenyiFilter.from_dict(saved[run % len(saved)])
        counts = np.zeros(len(pool))
        patience = rng.integers(1, 8)
        while patience:
            i, steps = rng.integers(len(pool)), int(rng.integers(1, 10**rng.integers(1, 5)))
            if rng.random() < 0.3:
                steps = max(1, budget.steps_left(pool[i][0], sample_rate=pool[i][1])
                            + int(rng.integers(0, 2)))
            before = budget.spent
            if budget.request(step(*pool[i], steps)):
                counts[i] += steps
            else:
                assert budget.spent == before
                patience -= 1
        certified = rdp_to_epsilon(counts @ curves, delta=budget.delta).epsilon
        assert certified <= budget.target_epsilon and budget.spent <= budget.target_epsilon
        spent.append(certified/budget.target_epsilon)
    assert max(spent) > 0.999999 # and they really went to the limit


@pytest.mark.slow
def test_an_adversary_that_solves_for_the_limit():
    rng = np.random.default_rng(11)
    for _ in range(60):
        budget = RenyiFilter.planned(HAM, target_epsilon=float(rng.uniform(0.5, 10)), delta=1e-5,
                                     spread=float(rng.choice([0, 0.1])))
        for _ in range(int(rng.integers(1, 12))):
            steps, q = int(rng.integers(1, 200)), float(rng.uniform(0.001, 0.2))
            least = budget.least_noise_multiplier(sample_rate=q, steps=steps)
            if least == math.inf: break
            assert not budget.allows(step(least*(1 - 1e-4), q, steps))
            assert budget.request(step(least*rng.choice([1, 1.5, 3]), q, steps))
        assert (certify(budget.events, delta=1e-5, accountants=("rdp",))["rdp"].epsilon
                <= budget.target_epsilon)


@pytest.mark.slow
def test_pld_certifies_no_more_than_the_filter():
    budget = RenyiFilter.planned(HAM, target_epsilon=3, delta=1e-5)
    for sigma in np.linspace(2.0, 0.9, 12):
        budget.request(step(float(sigma), HAM.sample_rate, 200))
    assert certify(budget.events, delta=1e-5)["pld"].epsilon <= budget.spent <= 3


def test_exact_delta_of_an_adaptive_pair():
    budget = RenyiFilter({8.0: 1.0}, target_epsilon=2.0, delta=1e-3)
    assert budget.request(step(3.0, 1))
    bold = budget.least_noise_multiplier(sample_rate=1)
    y = np.linspace(-36, 37, 4001)
    density = np.exp(-(y - 1)**2/18)/math.sqrt(18*math.pi)
    left = 2 - (y - 0.5)/9 # epsilon that is left after the first outcome's loss
    both = (
        np.array([[max(gaussian_delta(s, sensitivity=1, epsilon=e), -math.expm1(e)) for e in left]
                  for s in (bold, 50.0)]))
    # the chooser knows, after each outcome, which is worse
    worst = np.trapezoid(density*both.max(axis=0), y)
    assert worst <= 1e-3


def test_minimum_over_orders_is_no_filter_but_shares_are():
    def rare(p, loss):
        return np.array([p, 1 - p]), np.array([p*math.exp(-loss), 1 - p*math.exp(-loss)])
    def divergence(p, q):
        return np.array([max(math.log((a**o*b**(1 - o)).sum())/(o - 1) for a, b in ((p, q), (q, p)))
                         for o in orders])
    orders = np.geomspace(1.5, 30, 200)
    heads, second = math.exp(0.1)/(1 + math.exp(0.1)), (rare(0.0296, 7.96), rare(0.00215, 8.56))
    first = np.array([heads, 1 - heads]), np.array([1 - heads, heads])
    sums = [divergence(*first) + divergence(*branch) for branch in second]
    naive = [(s + _order_offsets({o: 1.0}, delta=1e-3)[0]) for branch in sums
             for o, s in zip(orders, branch)]
    assert min(naive[:200]) <= 8 and min(naive[200:]) <= 8 # each path passes at some order
    p, q = (np.concatenate([first[k][i]*second[i][k] for i in (0, 1)]) for k in (0, 1))
    assert np.maximum(p - math.exp(8)*q, 0).sum() > 1.25e-3 # and delta is passed
    offsets = _order_offsets({o: 1/200 for o in orders}, delta=1e-3)
    assert any((branch + offsets).min() > 8 for branch in sums)


def test_shares_and_offsets():
    shares = planned_orders(HAM, target_epsilon=3, delta=1e-3, spread=0.1)
    np.testing.assert_allclose(sum(shares.values()), 1, rtol=1e-12)
    assert max(shares, key=shares.get) in ORDERS
    assert len(planned_orders(HAM, target_epsilon=3, delta=1e-3)) == 1
    assert (_order_offsets(shares, delta=1e-3)
            < _order_offsets(shares, delta=1e-3, at_all_times=True)).all()


def test_odometer_reads_above_the_filter_and_never_falls():
    shares, rng = {4.0: 0.5, 12.0: 0.5}, np.random.default_rng(12)
    odometer = RenyiOdometer(shares, delta=1e-5)
    budget = RenyiFilter(shares, target_epsilon=50, delta=1e-5)
    last = 0.0
    assert odometer.spent == 0
    for _ in range(50):
        event = step(float(rng.uniform(0.8, 4)), steps=int(rng.integers(0, 20)))
        reading = odometer.add(event)
        assert budget.request(event) and last <= reading and (reading >= budget.spent)
        last = reading


def test_same_batch_is_one_release():
    events = [step(1.0, 0.02, 500), step(2.0, 0.02, 500)]
    one = same_batch(*events)
    np.testing.assert_allclose(one.noise_multiplier, 2/math.sqrt(5), rtol=1e-14)
    def epsilon(events): return rdp_to_epsilon(rdp_of_events(events), delta=1e-5).epsilon
    assert epsilon([one]) > epsilon(events)
    full = same_batch(step(1.0, 1, 3), step(2.0, 1, 3)) # without sampling the two ways are one
    np.testing.assert_allclose(rdp_of_events([full]),
                               rdp_of_events([step(1.0, 1, 3), step(2.0, 1, 3)]), rtol=1e-12)


def test_interruption_changes_no_bit():
    rng = np.random.default_rng(13)
    one = RenyiFilter.planned(HAM, target_epsilon=2, delta=1e-5, spread=0.1)
    other = RenyiFilter.planned(HAM, target_epsilon=2, delta=1e-5, spread=0.1)
    for _ in range(300):
        event = step(float(rng.uniform(0.7, 2)), HAM.sample_rate, int(rng.integers(1, 30)))
        assert one.request(event) == other.request(event)
        other = RenyiFilter.from_dict(json.loads(json.dumps(other.to_dict())))
        assert one.sums.tolist() == other.sums.tolist() and one.events == other.events


def test_a_decision_takes_less_than_a_millisecond():
    budget = RenyiFilter.planned(HAM, target_epsilon=8, delta=1e-5, spread=0.1)
    rng = np.random.default_rng(14)
    times = []
    for sigma in rng.uniform(0.8, 3, 300):
        started = time.perf_counter()
        budget.request(step(float(sigma), HAM.sample_rate))
        times.append(time.perf_counter() - started)
    assert np.median(times) < 1e-3


def test_filters_refuse_nonsense():
    with pytest.raises(ValueError, match="the conversion term"):
        RenyiFilter({1.5: 1.0}, target_epsilon=1, delta=1e-5)
    with pytest.raises(ValueError, match="sum to at most 1"):
        RenyiFilter({2.0: 0.9, 3.0: 0.2}, target_epsilon=100, delta=1e-5)
    with pytest.raises(ValueError, match="delta must be in"):
        RenyiOdometer({2.0: 1.0}, delta=math.nan)
    with pytest.raises(ValueError, match="spread must be in"):
        planned_orders(HAM, target_epsilon=1, delta=1e-5, spread=math.nan)
    budget = RenyiFilter({64.0: 1.0}, target_epsilon=1, delta=1e-5)
    assert not budget.request(step(1e-5)) and budget.spent == 0 and budget.events == []
