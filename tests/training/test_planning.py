"Plans: every step clips to its epoch's bound, and a kept budget is found by another process."
import subprocess
import sys

import pytest

from dp_companion.papers.global_adapt_v2.grid import method_values, profile_named
from dp_companion.training.planning import cached, rule_of_step, step_bounds
from dp_companion.training.spec import run_spec

SIZE = profile_named("digits")


@pytest.mark.parametrize("method", ["DP-SGD-Global-Adapt-V2", "DP-SGD-Global-Adapt-V2-S"])
def test_every_step_has_the_bound_of_its_epoch(method):
    spec = run_spec(**method_values(SIZE, method), accounting="certified", target_epsilon=1.,
                    noise_multiplier=1., seed=0)
    plan, rule = SIZE.plan_of(SIZE.run_values), spec.method.rule(10)
    bounds, step = step_bounds(spec.method, plan), 0
    for epoch, steps in enumerate(plan.steps_per_epoch):
        for _ in range(steps):
            due = 3*.5**(epoch//SIZE.drop_every) # z_0 R^floor(e/K)
            rule = rule_of_step(rule, bounds, step)
            assert rule.strict_max_grad_norm == pytest.approx(due, rel=1e-12)
            step += 1
    assert step == len(bounds) == plan.steps


@pytest.mark.slow
def test_a_kept_budget_is_not_computed_again(tmp_path):
    code = ("import sys; from dp_companion.training.planning import cached\n"
            "from dp_companion.budgets.schedules import Constant, PoissonPlan\n"
            "from dp_companion.training.multipliers import first_multiplier\n"
            "kept = cached(first_multiplier, sys.argv[1])\n"
            "asked = (Constant(initial=1.), PoissonPlan(dataset_size=900, expected_batch_size=90,"
            " epochs=2), 'as_printed', 1., 1e-5, None)\n"
            "print(kept.check_call_in_cache(*asked), kept(*asked))")
    said = [subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, text=True,
                           capture_output=True).stdout.split() for _ in range(2)]
    assert [known for known, _ in said] == ["False", "True"]
    assert said[0][1] == said[1][1]
    assert cached(int, tmp_path).func is int
