"Optimizers and learning rates: finite, positive, and private."
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from dp_companion.algorithms.clipping import clip_rule
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.training.datasets import load_dataset
from dp_companion.training.models import build_model
from dp_companion.training.optimizers import (
    LR_SCHEDULERS, OPTIMIZERS, build_lr_scheduler, build_optimizer, observe
)

properties = settings(derandomize=True, max_examples=40, deadline=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", LR_SCHEDULERS)
@properties
@given(st.integers(1, 300), st.floats(1e-6, 10))
def test_rates_stay_finite_positive_and_scale_with_the_initial_one(name, steps, learning_rate):
    def rates(initial):
        optimizer = build_optimizer(
            "sgd", [torch.nn.Parameter(torch.zeros(1))], learning_rate=initial
        )
        scheduler = build_lr_scheduler(name, optimizer, learning_rate=initial, steps=steps)
        used = []
        for t in range(steps):
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            observe(scheduler, public_loss=1.)
        return np.array(used)
    used = rates(learning_rate)
    assert np.isfinite(used).all()
    assert (used > 0).all()
    assert used.max() <= 25*learning_rate*(1 + 1e-9)
    np.testing.assert_allclose(used, rates(1.)*learning_rate, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_private_steps(name):
    data, model = load_dataset("digits"), build_model("unbalanced_mnist_cnn", seed=0, image_size=8)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = build_optimizer(name, model.parameters(), learning_rate=1e-3, weight_decay=1e-3)
    step = PrivateStep(
        model, optimizer, clip_rule=clip_rule("flat", max_grad_norm=1.), expected_batch_size=64,
        generator=torch.Generator().manual_seed(0)
    )
    for k in range(3):
        step(
            cross_entropy, data.train_images[64*k:64*k + 64], data.train_labels[64*k:64*k + 64],
            noise_multiplier=1.
        )
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert after.isfinite().all()
    assert not torch.equal(before, after)


def test_only_the_plateau_hears_the_public_loss():
    for name in LR_SCHEDULERS:
        optimizers = [
            build_optimizer("sgd", [torch.nn.Parameter(torch.zeros(1))], learning_rate=1.)
            for _ in range(2)
        ]
        schedulers = [build_lr_scheduler(name, o, learning_rate=1., steps=50) for o in optimizers]
        for t in range(50):
            for o, s, loss in zip(optimizers, schedulers, (1/(t + 1), 1.)):
                o.step()
                s.step()
                observe(s, public_loss=loss)
        same = optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert same == (name != "plateau")
