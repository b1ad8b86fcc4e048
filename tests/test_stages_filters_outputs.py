"""Stages, privacy filters and noise on outputs: what trains is certified, what adapts never overspends."""
import json
import math
import time

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_companion.budgets.certified import calibrate, certify
from dp_companion.budgets.events import MechanismEvent, gaussian_events, per_step_multipliers
from dp_companion.budgets.filters import RenyiFilter, RenyiOdometer, _order_offsets, planned_orders, same_batch
from dp_companion.budgets.outputs import _MECHANISMS, count_error, gaussian_delta, gaussian_std, _laplace_delta, laplace_scale
from dp_companion.budgets.rdp import ORDERS, rdp_of_events, rdp_to_epsilon
from dp_companion.budgets.schedules import Constant, PoissonPlan
from dp_companion.budgets.stages import Stages, calibrated, exact_stage_lengths, sad_methods, _schedule_shape, _stage_lengths

properties = settings(derandomize=True, max_examples=60, deadline=None)
HAM = PoissonPlan(dataset_size=8012, expected_batch_size=128, epochs=50)


def step(noise_multiplier, sample_rate=0.01, steps=1):
    return MechanismEvent(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)


# Stages

@properties
@given(st.integers(1, 10**6), st.integers(1, 12), st.floats(0.05, 1.0))
def test_lengths_are_whole_and_sum_to_the_run(length, stages, ratio):
    exact = exact_stage_lengths(length, stages=stages, length_ratio=ratio)
    try:
        whole = _stage_lengths(length, stages=stages, length_ratio=ratio)
    except ValueError as error:
        assert exact[0] < 1 and "one step in each" in str(error)
        return
    assert whole.sum() == length and whole.min() >= 1 and (np.diff(whole) >= 0).all()
    assert (np.abs(whole - exact) < 1 + 1e-6).all()


def test_published_stage_lengths():
    np.testing.assert_allclose(exact_stage_lengths(50, stages=3, length_ratio=0.9),
                               [14.94, 16.61, 18.45], atol=0.005)


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_stage_values_follow_the_recursion(ratio):
    schedule = Stages.of_plan(HAM, initial=2.0, value_ratio=ratio, stages=4, length_ratio=0.7)
    values, ends = schedule.values(HAM.steps), np.cumsum(schedule.lengths)
    for i in range(3):
        np.testing.assert_allclose(values[ends[i] - 1], ratio*values[ends[i]], rtol=1e-14)
    assert len(np.unique(values)) == 4 and values[0] == 2.0
    assert values.tolist() == [schedule.at(t) for t in range(HAM.steps)]


@pytest.mark.parametrize("target", [3, 8, 16])
@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_what_trains_is_what_was_certified(target, unit):
    for shape in (Stages.of_plan(HAM, initial=1, value_ratio=0.8, unit=unit),
                  *sad_methods(HAM, as_in_its_code=True).values()):
        schedule = calibrated(shape, HAM, target_epsilon=target, delta=1e-3)
        events = gaussian_events(schedule, HAM)
        assert per_step_multipliers(events).tolist() == HAM.per_step(schedule).tolist()
        epsilon = certify(events, delta=1e-3, accountants=("rdp",))["rdp"].epsilon
        assert target*(1 - 5e-3) < epsilon <= target
        assert schedule.initial == calibrate(shape, HAM, target_epsilon=target, delta=1e-3)


def test_stages_refuse_another_run():
    schedule = Stages.of_plan(HAM, initial=1, value_ratio=0.8)
    longer = PoissonPlan(dataset_size=8012, expected_batch_size=128, epochs=51)
    with pytest.raises(ValueError, match="index must be < length=3129"):
        gaussian_events(schedule, longer)
    for wrong in (dict(value_ratio=0.0), dict(value_ratio=math.nan), dict(length_ratio=0.0),
                  dict(length_ratio=math.nan), dict(stages=0), dict(length=2)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Stages(**dict(initial=1.0, length=50, value_ratio=0.8) | wrong)


def test_tendencies_of_figures_3_to_5():
    def shape(**rest):
        return _schedule_shape(calibrated(Stages.of_plan(HAM, initial=1, **rest), HAM,
                                         target_epsilon=3, delta=1e-3), HAM)
    low, high = (shape(value_ratio=beta) for beta in (0.6, 0.8))
    assert low.mean > high.mean and low.variance > high.variance and low.initial < high.initial
    short, equal = (shape(value_ratio=0.8, length_ratio=gamma) for gamma in (0.3, 0.9))
    assert short.initial < equal.initial
    assert short.variance < equal.variance
    assert short.first_length < equal.first_length
    few, many = (shape(value_ratio=0.9, stages=n) for n in (3, 5))
    assert few.mean < many.mean and few.variance < many.variance and few.initial > many.initial


# Filters

def test_constant_noise_stops_where_the_accountant_does():
    for target, delta in ((0.5, 1e-5), (3, 1e-3), (10, 1e-6)):
        sigma = calibrate(Constant(initial=1), HAM, target_epsilon=target, delta=delta)
        budget = RenyiFilter.planned(HAM, target_epsilon=target, delta=delta)
        assert budget.steps_left(sigma, sample_rate=HAM.sample_rate) >= HAM.steps
        assert budget.request(step(sigma, HAM.sample_rate, HAM.steps))
        fixed = certify(budget.events, delta=delta, accountants=("rdp",))["rdp"].epsilon
        np.testing.assert_allclose(budget.spent, fixed, rtol=1e-10)
        assert budget.left < 1e-3*target and not budget.allows(step(0.5, HAM.sample_rate, 50))


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


# Outputs

@properties
@given(st.floats(1e-3, 1e3), st.floats(0.01, 50), st.floats(1e-12, 0.5))
def test_gaussian_meets_delta_and_barely(sensitivity, epsilon, delta):
    sigma = gaussian_std(sensitivity, target_epsilon=epsilon, delta=delta)
    with mpmath.workdps(50):
        def exact(s):
            m = mpmath.mpf(sensitivity)/s
            def phi(x): return mpmath.erfc(-x/mpmath.sqrt(2))/2
            return phi(m/2 - epsilon/m) - mpmath.exp(epsilon)*phi(-m/2 - epsilon/m)
        assert exact(sigma) <= delta*(1 + 1e-8) and exact(sigma*(1 - 1e-5)) > delta


def test_gaussian_agrees_with_pld():
    for epsilon, delta in ((0.5, 1e-5), (1, 1e-3), (8, 1e-6)):
        sigma = gaussian_std(1.0, target_epsilon=epsilon, delta=delta)
        found = certify([step(sigma, 1)], delta=delta, accountants=("pld",))["pld"].epsilon
        assert epsilon*(1 - 1e-6) <= found <= epsilon*(1 + 1e-3)


def test_laplace_agrees_with_pld():
    from dp_accounting.pld import privacy_loss_distribution as pld
    for epsilon in (0.3, 1.0, 4.0):
        b = laplace_scale(2.0, target_epsilon=epsilon)
        found = pld.from_laplace_mechanism(b/2.0, value_discretization_interval=1e-4)
        for at in (0.1*epsilon, 0.7*epsilon, 1.01*epsilon):
            np.testing.assert_allclose(_laplace_delta(b, sensitivity=2.0, epsilon=at),
                                       found.get_delta_for_epsilon(at), atol=1e-4)


def test_errors_in_their_order():
    for epsilon in (0.1, 1, 5):
        for records in (10, 10_000):
            errors = {m: count_error(m, records=records, epsilon=epsilon).std for m in _MECHANISMS}
            assert (errors["local randomized response"] < errors["local laplace"]
                    < errors["local gaussian"])
            # not so for 10 records at epsilon 5
            if records == 10_000:
                assert errors["central laplace"] < errors["local randomized response"]
            np.testing.assert_allclose(errors["local gaussian"],
                                       math.sqrt(records)*errors["central gaussian"], rtol=1e-12)
