"Events are the schedule, step by step."
import dataclasses
import json

import numpy as np
from hypothesis import given
from strategies import plans, properties, schedules

from dp_companion.budgets.events import MechanismEvent, gaussian_events, per_step_multipliers
from dp_companion.budgets.schedules import LinearDecay, PoissonPlan, StepDecay


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
