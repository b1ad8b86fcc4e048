"Schedules and plans: values, steps and bad input."
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import initials, plans, properties, schedules

from dp_companion.budgets.events import MechanismEvent, gaussian_events
from dp_companion.budgets.schedules import (Constant, LinearDecay, PoissonPlan, StepDecay,
                                            TimeDecay, schedule)


@properties
@given(schedules, st.integers(0, 40))
def test_values_are_at_and_never_rise(any_schedule, epochs):
    values = any_schedule.values(epochs)
    assert values.shape == (epochs,)
    assert values.tolist() == [any_schedule.at(epoch) for epoch in range(epochs)]
    assert (values > 0).all() and (np.diff(values) <= 0).all()
    if epochs:
        assert values[0] == any_schedule.initial


@properties
@given(schedules, initials)
def test_rescaling_keeps_the_shape(any_schedule, initial):
    rescaled = any_schedule.rescaled(initial)
    assert type(rescaled) is type(any_schedule) and rescaled.initial == initial
    np.testing.assert_allclose(rescaled.values(20)/initial,
                               any_schedule.values(20)/any_schedule.initial, rtol=1e-14)


@properties
@given(schedules)
def test_decay_of_the_variance_is_the_square_root(any_schedule):
    if isinstance(any_schedule, Constant): return
    variance, value = (dataclasses.replace(any_schedule, decay_of=what)
                       for what in ("variance", "value"))
    np.testing.assert_allclose((variance.values(20)/variance.initial)**2,
                               value.values(20)/value.initial, rtol=1e-13)


@properties
@given(plans())
def test_steps_of_the_epochs(plan):
    counts = plan.steps_per_epoch
    assert counts.shape == (plan.epochs,) and counts.dtype.kind == "i"
    assert (counts.sum() == plan.steps
            == math.floor(plan.epochs*plan.dataset_size/plan.expected_batch_size))
    assert np.bincount([plan.epoch_of(t) for t in range(plan.steps)],
                       minlength=plan.epochs).tolist() == counts.tolist()


def test_table_1_by_hand():
    assert StepDecay(initial=4.0, decay_rate=0.25, drop_every=2).values(5).tolist() == [4, 4, 2, 2,
        1]
    assert LinearDecay(initial=4.0, decay_rate=0.25).values(3).tolist() == [4, 2, 1]
    assert TimeDecay(initial=4.0, decay_rate=0.75).values(5).tolist() == [4, 4/1.75**.5, 4/2.5**.5,
        4/3.25**.5, 2]
    assert StepDecay(initial=3.0, decay_rate=0.5, drop_every=10,
                     decay_of="value").values(21)[::10].tolist() == [3, 1.5, 0.75]


def test_paper_plan():
    plan = PoissonPlan(dataset_size=60000, expected_batch_size=64, epochs=100)
    assert (plan.steps, plan.sample_rate) == (93750, 64/60000)
    assert plan.epoch_of(937) == 0 and plan.epoch_of(938) == 1
    events = gaussian_events(schedule("step", initial=0.1916, decay_rate=0.5, drop_every=10), plan)
    assert [event.steps for event in events] == [9375]*10


def test_floats_would_misplace_a_step():
    plan = PoissonPlan(dataset_size=49000, expected_batch_size=250, epochs=100)
    assert any(int(plan.sample_rate*t) != plan.epoch_of(t) for t in range(plan.steps))
    assert int(100/(100/60000)) == 59999
    assert PoissonPlan(dataset_size=60000, expected_batch_size=100, epochs=100).steps == 60000


NAN, INF = float("nan"), float("inf")
LEGAL = {
    Constant: dict(initial=1.0),
    LinearDecay: dict(initial=1.0, decay_rate=0.5),
    TimeDecay: dict(initial=1.0, decay_rate=0.5),
    StepDecay: dict(initial=1.0, decay_rate=0.5, drop_every=10),
    PoissonPlan: dict(dataset_size=100, expected_batch_size=10, epochs=5),
    MechanismEvent: dict(noise_multiplier=1.0, sample_rate=0.1, steps=3)}
BAD = [(cls, "initial", value) for cls in (Constant, LinearDecay, TimeDecay, StepDecay)
       for value in (0, -1.0, NAN, INF, "1", None, True)]


@pytest.mark.parametrize("cls, name, value", BAD)
def test_bad_input_is_one_sentence_with_name_and_value(cls, name, value):
    with pytest.raises(ValueError) as error:
        cls(**{**LEGAL[cls], name: value})
    text = str(error.value)
    assert text.startswith(f"{name} must be ")
    assert text.endswith(f"got {name}={value!r}" if name == "query" or value in ("1", "7")
                         else f"got {name}={value}")
    assert "\n" not in text


@pytest.mark.parametrize("kind, given_, name", [
    ("cosine", {}, "kind"), ("step", {"decay_rate": 0.5}, "drop_every"),
    ("linear", {}, "decay_rate"), ("none", {"decay_rate": 0.5}, "decay_rate"),
    ("time", {"decay_rate": 0.5, "drop_every": 10}, "drop_every")])
def test_the_factory_wants_what_the_kind_needs(kind, given_, name):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        schedule(kind, initial=1.0, **given_)


def test_a_value_that_vanishes_is_an_error():
    with pytest.raises(ValueError,
                       match="every value of a schedule must be > 0, got 0 at index 324;"):
        LinearDecay(initial=1.0, decay_rate=0.1).values(1000)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Constant(initial=1.0).initial = 2.0
