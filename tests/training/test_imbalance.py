"Imbalance: metrics by hand, class weights, noisy counts."
import numpy as np
import pytest
import torch
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.training.ham10000 import CLASSES, PUBLISHED_COUNTS
from dp_companion.training.imbalance import (
    group_metrics, noisy_class_counts, public_class_weights
)

DX = list(CLASSES)


def test_metrics_by_hand():
    labels = torch.tensor([4, 4, 4, 4, 0, 0, 5, 6])
    predictions = torch.tensor([4, 4, 4, 0, 0, 4, 4, 6])
    logits = torch.nn.functional.one_hot(predictions, 7).double()
    assert group_metrics(logits, labels, minority=(0, 1, 2, 3, 5, 6)) == {
        "test_matthews": pytest.approx(
            (5*8 - (4*5 + 2*2 + 1))/((64 - 25 - 4 - 1)*(64 - 16 - 4 - 2))**.5),
        "test_precision": pytest.approx((3/5 + 1/2 + 0 + 1)/4),
        "test_recall": pytest.approx((3/4 + 1/2 + 0 + 1)/4),
        "test_accuracy_majority": 3/4, "test_accuracy_minority": 2/4
    }
    other = group_metrics(logits, labels, minority=(4, 5, 6))
    assert (other["test_accuracy_majority"], other["test_accuracy_minority"]) == (1/2, 4/6)


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("seed", range(3))
def test_matthews_of_two_classes_is_the_correlation(seed):
    draw = torch.Generator().manual_seed(seed)
    labels = (torch.rand(500, generator=draw) < .2).long()
    logits = torch.randn(500, 2, generator=draw)
    logits[:, 1] += labels - .5
    found = group_metrics(logits, labels, minority=(1,))
    np.testing.assert_allclose(
        found["test_matthews"], np.corrcoef(labels, logits.argmax(1))[0, 1], rtol=1e-9
    )
    groups = found["test_accuracy_majority"], found["test_accuracy_minority"]
    np.testing.assert_allclose(found["test_recall"], np.mean(groups), rtol=1e-12)


def test_class_weights_give_each_class_the_same_say():
    weights = public_class_weights()
    said = [weight*count for weight, count in zip(weights, PUBLISHED_COUNTS.values())]
    np.testing.assert_allclose(said, said[0], rtol=1e-12)
    assert public_class_weights(exponent=0) == pytest.approx((1,)*7)
    assert weights.index(max(weights)) == DX.index("df")
    assert weights.index(min(weights)) == DX.index("nv")


def test_noisy_counts_say_what_they_cost():
    labels = torch.tensor([0]*50 + [2]*7)
    counts, event = noisy_class_counts(
        labels, classes=3, noise_multiplier=1e-6,
        noise=GaussianNoise(generator=torch.Generator().manual_seed(0))
    )
    assert counts == pytest.approx({0: 50, 1: 1, 2: 7}, abs=1e-4) # an empty class is raised to 1
    assert (event.noise_multiplier, event.sample_rate, event.steps, event.query) == (
        1e-6, 1, 1, "class_counts"
    )
    a, b = (
        noisy_class_counts(
            labels, classes=3, noise_multiplier=5., noise=GaussianNoise(secure=True)
        )[0]
        for _ in range(2)
    )
    assert a != b
    assert min(*a.values(), *b.values()) >= 1
