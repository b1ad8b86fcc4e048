"Initial multipliers: another accountant finds the target spent, and no more."
import numpy as np
import pytest
from opacus.accountants import PRVAccountant

from dp_companion.budgets.schedules import Constant, LinearDecay, PoissonPlan, StepDecay
from dp_companion.training.multipliers import first_multiplier

PLAN = PoissonPlan(dataset_size=2000, expected_batch_size=100, epochs=4)
SHAPES = {"constant": Constant(initial=1.), "linear": LinearDecay(initial=1., decay_rate=.8),
          "step": StepDecay(initial=1., decay_rate=.5, drop_every=2)}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", (1., 8.))
def test_a_certified_multiplier_spends_its_target_by_prv(shape, target):
    sigma = first_multiplier(SHAPES[shape], PLAN, "certified", target, 1e-5)
    applied = PLAN.per_step(SHAPES[shape].rescaled(sigma))
    prv = PRVAccountant()
    prv.history = [(s, PLAN.sample_rate, int((applied == s).sum())) for s in np.unique(applied)]
    assert prv.get_epsilon(1e-5, eps_error=.01) == pytest.approx(target, rel=.02)


@pytest.mark.slow
def test_counts_cost_the_gradient_noise():
    alone, counted = (first_multiplier(SHAPES["constant"], PLAN, "certified", 3., 1e-5, count)
                      for count in (None, 5.))
    assert counted > alone
    assert (counted**-2 + 5.**-2)**-.5 == pytest.approx(alone, rel=5e-3) # together as before


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_filtered_multiplier_is_at_least_the_certified_one(shape):
    certified, filtered = (first_multiplier(SHAPES[shape], PLAN, accounting, 3., 1e-5)
                           for accounting in ("certified", "filtered"))
    assert filtered >= certified
