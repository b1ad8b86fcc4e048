"Schedules and plans to draw from, for the properties of budgets."
from hypothesis import settings
from hypothesis import strategies as st

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
    least = max(1, dataset_size//60)
    return PoissonPlan(dataset_size=dataset_size,
                       expected_batch_size=draw(st.integers(least, dataset_size)),
                       epochs=draw(st.integers(1, 12)))
