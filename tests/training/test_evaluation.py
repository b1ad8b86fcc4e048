"Evaluation agrees with scikit-learn on random networks."
import numpy as np
import pytest
import torch
from sklearn import metrics

from dp_companion.training.datasets import load_dataset
from dp_companion.training.evaluation import evaluate, evaluate_auc
from dp_companion.training.models import build_model


@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_scikit_learn(seed):
    data, model = load_dataset("digits"), build_model("mnist_cnn", seed=seed, image_size=8)
    found = evaluate(model, data)
    with torch.no_grad(): logits = model(data.test_images).double()
    labels, scores = data.test_labels.numpy(), torch.softmax(logits, 1).numpy()
    assert found["test_accuracy"] == pytest.approx(
        metrics.accuracy_score(labels, scores.argmax(1)))
    assert found["test_loss"] == pytest.approx(metrics.log_loss(labels, scores), rel=1e-5)
    np.testing.assert_allclose(found["test_accuracy_by_class"], metrics.recall_score(
        labels, scores.argmax(1), average=None, zero_division=0))
    assert evaluate_auc(model, data) == pytest.approx(metrics.roc_auc_score(
        labels, scores, multi_class="ovr"), rel=1e-6)


def test_evaluation_leaves_the_network_as_it_was():
    data, model = load_dataset("digits"), build_model("unbalanced_mnist_cnn", seed=0, image_size=8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = evaluate(model, data), evaluate(model, data)
    assert first == second
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
