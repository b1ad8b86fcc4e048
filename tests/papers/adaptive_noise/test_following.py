"Noise that follows a signal stays within its filter; Algorithm 4.1 is as private as 2C says."
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from opacus.accountants.analysis.rdp import compute_rdp

from dp_companion.budgets.filters import RenyiFilter
from dp_companion.budgets.schedules import PoissonPlan
from dp_companion.papers.adaptive_noise.following import (
    BatchClip, BatchStep, FollowingNoise
)

plan = PoissonPlan(dataset_size=1437, expected_batch_size=128, epochs=4)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.floats(-1, 5), min_size=44, max_size=44), st.floats(.1, 1.), st.floats(1.5, 8.),
       st.sampled_from([None, 4., 20.]))
def test_whatever_is_released_the_target_is_kept(signals, floor, initial, loss_noise):
    target = dict(target_epsilon=2., delta=1e-5)
    noise = FollowingNoise(initial=initial, floor=floor, privacy_filter=RenyiFilter.planned(plan,
        **target), sample_rate=plan.sample_rate, signal_noise=loss_noise)
    (order,), applied = noise.filter.shares, []
    for t, value in enumerate(signals):
        if (sigma := noise.next()) is None: break
        applied.append(sigma); noise.see(value)
        if t % 11 == 10: noise.end_epoch()
    joint = [s if loss_noise is None else (s**-2 + loss_noise**-2)**-.5 for s in applied]
    spent = sum(compute_rdp(q=plan.sample_rate, noise_multiplier=s, steps=joint.count(s),
                            orders=[order])[0] for s in set(joint))
    assert spent + math.log1p(-1/order) - (math.log(1e-5) + math.log(order))/(order - 1) <= 2*(1
        + 1e-9)
    assert all(a >= b for a, b in zip(applied, applied[1:]))
    assert min(applied) >= floor*initial*(1 - 1e-12)


def test_a_state_goes_through_a_file_and_back():
    def new():
        return FollowingNoise(initial=3., floor=.5, privacy_filter=RenyiFilter.planned(plan,
            target_epsilon=2., delta=1e-5), sample_rate=plan.sample_rate)
    noise, other = new(), new()
    for _ in range(5): noise.see(noise.next()/10)
    noise.end_epoch()
    other.load(noise.state())
    assert other.state() == noise.state() and other.next() == noise.next()


@pytest.mark.slow
def test_algorithm_4_1_has_the_privacy_of_sensitivity_2c():
    "Worst neighbours, one step: mean gap 2C, noise 2C*noise_multiplier, mu 1/noise_multiplier."
    model = torch.nn.Linear(1, 1, bias=False)
    step = BatchStep(model, torch.optim.SGD(model.parameters(), lr=0.),
                     clip_rule=BatchClip(max_grad_norm=.7), generator=torch.Generator().manual_seed(
                         0))
    def seen(inputs):
        step(lambda outputs, targets: outputs[:, 0], torch.tensor(inputs)[:, None],
             torch.zeros(len(inputs)), noise_multiplier=2.)
        return model.weight.grad.item()
    without, together = (np.array([seen(inputs) for _ in range(1500)])
                         for inputs in ([5., 5.], [5., 5., -1e4]))
    mu = (without.mean() - together.mean())/without.std()
    assert abs(mu - 1/2) < 4*math.sqrt(2/1500)
