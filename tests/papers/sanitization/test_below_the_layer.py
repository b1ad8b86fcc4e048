"The attack on weights below the layer."
import numpy as np
import pytest
import torch

from dp_companion.algorithms.sanitization import SanitizationLayer
from dp_companion.audits.bounds import finding_from_scores
from dp_companion.budgets.released_rows import RowRelease, claimed_rows
from dp_companion.budgets.schedules import PoissonPlan
from dp_companion.papers.sanitization.below_the_layer import (
    features_from_change, first_layer_change, marked
)


def moves(features, labels, plan, draws, seed=0, frozen=False):
    "How far the first pixel's column moves in each of some trainings with noise of 20."
    for s in range(seed, seed + draws):
        layer = SanitizationLayer(16, .3, 20., generator=torch.Generator().manual_seed(10**9 + s))
        change = first_layer_change(features, labels, plan, layer, seed=s, frozen=frozen)
        yield change[:, 0].abs().max().item()


@pytest.mark.slow
def test_more_than_5_where_less_than_a_tenth_is_printed():
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    features, labels = torch.tensor(images[:200]/16,
        dtype=torch.float32), torch.tensor(labels[:200])
    plan = PoissonPlan(dataset_size=200, expected_batch_size=20, epochs=2)
    claim = claimed_rows(RowRelease(width=16, noise_multiplier=20., releases=2), plan,
        delta=1e-5).epsilon
    scores = [np.array(list(moves(x, labels, plan, draws=640, seed=10_000*k)))
        for k, x in enumerate((features, marked(features)))]
    assert claim < .1 and finding_from_scores(*scores, delta=1e-5, thresholds=(0.,),
        confidence=.95).epsilon > 5


def test_one_pixel_moves_the_first_layer():
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    features, labels = torch.tensor(images[:60]/16, dtype=torch.float32), torch.tensor(labels[:60])
    plan = PoissonPlan(dataset_size=60, expected_batch_size=10, epochs=2)
    scores = {name: np.array(list(moves(x, labels, plan, draws=25, frozen=frozen)))
              for name, x, frozen in (("out", features, False), ("in", marked(features), False),
              ("frozen", marked(features), True))}
    assert (scores["out"] == 0).all() and (scores["in"] > 0).mean() > .9 and (
        scores["frozen"] == 0).all()


def test_one_step_shows_the_record():
    x = torch.rand(1, 30, generator=torch.Generator().manual_seed(0))
    # noise so large that it sometimes makes the right class certain, and the gradient exactly
    # zero: not with this seed
    layer = SanitizationLayer(16, .3, 1e3, generator=torch.Generator().manual_seed(2))
    change = first_layer_change(x, torch.tensor([3]),
        PoissonPlan(dataset_size=1, expected_batch_size=1, epochs=1), layer, seed=1)
    assert torch.nn.functional.cosine_similarity(features_from_change(change), x[0].double(),
        dim=0) > .9999
