"Events are the schedule, step by step."
import dataclasses
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_companion.budgets.events import MechanismEvent, gaussian_events, per_step_multipliers
from dp_companion.budgets.schedules import Constant, LinearDecay, PoissonPlan, StepDecay, TimeDecay

properties = settings(derandomize=True, max_examples=60, deadline=None)
initials = st.floats(1e-3, 1e3)
rates = st.floats(0.3, 0.999)
units = st.sampled_from(["epoch", "step"])
acts_on = st.sampled_from(["variance", "value"])
schedules = st.one_of(st.builds(Constant, initial=initials, unit=units),
                      st.builds(LinearDecay, initial=initials, unit=units,
                                decay_rate=st.floats(0.9, 0.999), decay_of=acts_on),
                      st.builds(TimeDecay, initial=initials, unit=units, decay_rate=rates,
                                decay_of=acts_on),
                      st.builds(StepDecay, initial=initials, unit=units, decay_rate=rates,
                                decay_of=acts_on, drop_every=st.integers(3, 40)))


@st.composite
def plans(draw):
    dataset_size = draw(st.integers(1, 400))
    return PoissonPlan(dataset_size=dataset_size,
                       expected_batch_size=draw(st.integers(max(1, dataset_size//60),
                           dataset_size)), epochs=draw(st.integers(1, 12)))


@properties
@given(schedules, plans())
def test_events_expand_to_the_schedule(any_schedule, plan):
    events = gaussian_events(any_schedule, plan)
    per_step = plan.per_step(any_schedule)
    assert sum(event.steps for event in events) == plan.steps == len(per_step)
    np.testing.assert_array_equal(per_step_multipliers(events), per_step)
    assert all(event.sample_rate == plan.sample_rate and event.steps > 0 for event in events)
    assert all(a.noise_multiplier != b.noise_multiplier for a, b in zip(events, events[1:]))
    index = (range(plan.steps) if any_schedule.unit == "step"
             else map(plan.epoch_of, range(plan.steps)))
    np.testing.assert_array_equal(per_step, [any_schedule.at(i) for i in index])


def test_an_epoch_without_steps_makes_no_event():
    plan = PoissonPlan(dataset_size=10, expected_batch_size=9, epochs=2)
    assert plan.steps_per_epoch.tolist() == [2, 0]
    assert [event.steps
            for event in gaussian_events(LinearDecay(initial=1.0, decay_rate=0.5), plan)] == [2]


def test_events_are_plain_json():
    events = gaussian_events(StepDecay(initial=1.0, decay_rate=0.5, drop_every=1),
                             PoissonPlan(dataset_size=10, expected_batch_size=3, epochs=3))
    assert ([MechanismEvent(**event)
             for event in json.loads(json.dumps([dataclasses.asdict(event) for event in events]))]
            == list(events))
