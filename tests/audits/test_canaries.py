"Canaries come near the certified epsilon, and a correct step stays under it."
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
import numpy as np
import pytest
from dp_companion.audits.bounds import (epsilon_to_mu)
from dp_companion.budgets.certified import calibrate, certify
from dp_companion.budgets.events import MechanismEvent, gaussian_events
from dp_companion.budgets.schedules import PoissonPlan, StepDecay

canaries = pytest.importorskip("dp_companion.audits.canaries")

DELTA = 1e-5


def rule_named(name):
    from dp_companion.algorithms.clipping import clip_rule
    return clip_rule(name, **({"num_groups": 2} if name == "group_adaptive" else {}))


def one_step(sigma): return (MechanismEvent(noise_multiplier=sigma, sample_rate=1, steps=1),)


def certified_step(name, sigma):
    return certify(rule_named(name).joint_events(one_step(sigma)), delta=DELTA)["pld"].epsilon


def audited(name, sigma, draws, seed, confidence, kind="random"):
    import torch
    torch.set_num_threads(1)
    return canaries.audit_step(
        rule_named(name), noise_multiplier=sigma, delta=DELTA, draws=draws, seed=seed,
        confidence=confidence, kind=kind
    ).epsilon


def in_two_processes(jobs):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return list(pool.map(audited, *zip(*jobs)))


@pytest.mark.parametrize(
    "name", ["auto_s", "psac", "global", "global_adapt", "global_adapt_v2", "group_adaptive"]
)
def test_every_rule_can_be_audited(name):
    sigma = 1/epsilon_to_mu(8, delta=DELTA)
    found = audited(name, sigma, 150, 3, .99, "one_hot")
    # its canary shares the noise with a larger group at times
    assert (.1 if name == "group_adaptive" else .3)*8 < found <= certified_step(name, sigma)


def test_seeds_repeat():
    first, again, other = (
        canaries.step_scores(rule_named("flat"), noise_multiplier=1., draws=3, seed=seed)[0]
        for seed in (5, 5, 6)
    )
    assert (first == again).all()
    assert (first != other).all()


def printed_schedule(setting):
    "V2-S with the noise that its paper gives for epsilon = 1."
    if setting == "mnist":
        return (
            StepDecay(initial=.1916, decay_rate=.5, drop_every=10),
            PoissonPlan(dataset_size=60_000, expected_batch_size=64, epochs=100)
        )
    from dp_companion.papers.global_adapt_v2.grid import profile_named
    size = profile_named("digits")
    plan = PoissonPlan(
        dataset_size=size.dataset_size, expected_batch_size=size.expected_batch_size,
        epochs=size.epochs
    )
    shape = StepDecay(initial=1., decay_rate=.5, drop_every=size.drop_every)
    return (
        replace(
            shape,
            initial=calibrate(shape, plan, target_epsilon=1., delta=DELTA, accountant="as_printed")
        ),
        plan
    )


@pytest.mark.slow
# no error in either world of 500 draws: 4.2
@pytest.mark.parametrize("setting, draws, least", [("mnist", 500, 3.9), ("digits", 40_000, 2)])
def test_v2_s_as_printed_is_refuted(setting, draws, least):
    events = gaussian_events(*printed_schedule(setting))
    found = canaries.audit_schedule(events, delta=DELTA, draws=draws, seed=0)
    assert least < found.epsilon <= certify(
        events, delta=DELTA, accountants=("rdp",)
    )["rdp"].epsilon


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flat", "global_adapt_v2"])
def test_a_draw_costs_at_most_fifteen_ordinary_steps(name):
    "So the six audits of the next test take 3 minutes on two cores."
    import torch
    from bench.private_step import ordinary
    audit, batch = canaries._CanaryStep(rule_named(name)), 1 + canaries._BYSTANDERS
    plain = ordinary(
        canaries.Directions(), torch.ones(batch, sum(canaries._LAYERS)),
        torch.zeros(batch, dtype=torch.long)
    )
    works, times = (lambda: audit(True, 1.), plain), ([], [])
    for _ in range(9):
        for work, found in zip(works, times):
            start = time.process_time()
            for _ in range(60):
                work()
            found.append(time.process_time() - start)
    print(f"{np.median(times[0])/np.median(times[1]):.1f} ordinary steps")
    # the first rounds, which look at samples, are not the median
    assert np.median(times[0]) <= 15*np.median(times[1])


@pytest.mark.slow
def test_tightness():
    "At least 80 % of the certified epsilon from 10,000 draws."
    cases = [(target, name) for target in (1, 4, 8) for name in ("flat", "global_adapt_v2")]
    sigma = {target: 1/epsilon_to_mu(target, delta=DELTA) for target, _ in cases}
    found = in_two_processes([
        (name, sigma[target], 10_000, seed, .95) for seed, (target, name) in enumerate(cases)
    ])
    for (target, name), epsilon in zip(cases, found):
        print(
            f"{name}: certified {certified_step(name, sigma[target]):.4f}, empirical {epsilon:.4f}"
        )
    for (target, name), epsilon in zip(cases, found):
        assert .8*certified_step(name, sigma[target]) <= epsilon


@pytest.mark.slow
def test_forty_audits_of_the_correct_engine():
    "At 95 % at most 4 bounds above the certified epsilon, none at 99.9 %."
    names = ["flat", "auto_s", "global_adapt_v2", "global_adapt"]
    cases = [
        (name, 1/epsilon_to_mu(target, delta=DELTA), 800, 1000*n + 100*target + k)
        for n, name in enumerate(names) for target in (1, 4) for k in range(5)
    ]
    above = [
        sum(
            found > certified_step(*case[:2])
            for case, found in zip(cases, in_two_processes([(*case, confidence) for case in cases]))
        )
        for confidence in (.95, .999)
    ]
    print(f"above the certified epsilon: {above[0]} of {len(cases)} at 95 %, {above[1]} at 99.9 %")
    assert above[0] <= 4
    assert above[1] == 0
