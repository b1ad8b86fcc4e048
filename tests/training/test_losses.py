"Losses: bounds for all logits, private steps, other processes."
import math
import pickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from dp_companion.algorithms.clipping import clip_rule
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.training.datasets import load_dataset
from dp_companion.training.losses import build_loss, focal_loss
from dp_companion.training.models import build_model

properties = settings(derandomize=True, max_examples=40, deadline=None)


@properties
@given(
    st.lists(st.floats(-200, 200), min_size=3, max_size=3), st.integers(0, 2), st.floats(0, 5),
    st.floats(0, 10)
)
def test_focal_loss_lies_between_zero_and_weighted_cross_entropy(logits, target, gamma, alpha):
    logits = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([target])
    loss = focal_loss(logits, target, alpha=alpha, gamma=gamma)
    ceiling = alpha*cross_entropy(logits, target)
    assert 0 <= loss.item() <= ceiling.item()*(1 + 1e-9)
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_focal_loss_in_a_private_step():
    data = load_dataset("digits")
    loss_fn = build_loss("focal", alpha=tuple(np.linspace(.1, 1, 10)), gamma=2.)
    model = build_model("unbalanced_mnist_cnn", seed=0, image_size=8).double()
    images, labels = data.train_images[:32].double(), data.train_labels[:32]
    ordinary = torch.autograd.grad(loss_fn(model(images), labels), list(model.parameters()))
    step = PrivateStep(
        model, torch.optim.SGD(model.parameters(), lr=0.),
        clip_rule=clip_rule("flat", max_grad_norm=1e9), expected_batch_size=32
    )
    report = step(loss_fn, images, labels, noise_multiplier=0.)
    for p, g in zip(step.model.parameters(), ordinary):
        torch.testing.assert_close(p.grad, g, rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(
        report.nonprivate_losses.double(),
        loss_fn(model(images), labels, reduction="none").detach(), rtol=1e-5, atol=1e-7
    )


def test_a_loss_can_be_sent_to_another_process():
    loss = pickle.loads(pickle.dumps(build_loss("focal", gamma=1.)))
    assert loss(torch.zeros(2, 2), torch.tensor([0, 1])).item() == pytest.approx(.5*math.log(2))
