"Stages: whole lengths, and what trains is what was certified."
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_companion.budgets.certified import calibrate, certify
from dp_companion.budgets.events import gaussian_events, per_step_multipliers
from dp_companion.budgets.schedules import PoissonPlan
from dp_companion.budgets.stages import (Stages, calibrated, exact_stage_lengths, sad_methods,
                                         _stage_lengths)

properties = settings(derandomize=True, max_examples=60, deadline=None)
HAM = PoissonPlan(dataset_size=8012, expected_batch_size=128, epochs=50)


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


@pytest.mark.slow
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
        assert schedule.initial == calibrate(shape, HAM, target_epsilon=target, delta=1e-3,
                                             accountant="rdp")


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
        sigma = HAM.per_step(calibrated(Stages.of_plan(HAM, initial=1, **rest), HAM,
                                        target_epsilon=3, delta=1e-3))
        return SimpleNamespace(mean=sigma.mean(), variance=sigma.var(), initial=sigma[0],
                               first_length=(sigma == sigma[0]).sum())
    low, high = (shape(value_ratio=beta) for beta in (0.6, 0.8))
    assert low.mean > high.mean and low.variance > high.variance and low.initial < high.initial
    short, equal = (shape(value_ratio=0.8, length_ratio=gamma) for gamma in (0.3, 0.9))
    assert short.initial < equal.initial
    assert short.variance < equal.variance
    assert short.first_length < equal.first_length
    few, many = (shape(value_ratio=0.9, stages=n) for n in (3, 5))
    assert few.mean < many.mean and few.variance < many.variance and few.initial > many.initial
