"Stopping flags on released values, and the bound that follows the weights."
import math

import numpy as np
import pytest
import torch

from dp_companion.algorithms.sanitization import SanitizationLayer
from dp_companion.papers.sanitization.early_stopping import (
    ReleasedStd, SlopeFlag, TrendFlag, epoch_error, follow_weights, moving_bound
)


def test_flags_see_released_values_only():
    layer = SanitizationLayer(400, .5, 1., .25, generator=torch.Generator().manual_seed(0))
    watch = ReleasedStd(layer)
    # evaluation is not watched
    layer(torch.full((300, 400), 9.))
    layer.eval()(torch.randn(300, 400))
    assert watch.close_epoch() == pytest.approx(layer.noise_std, rel=.01) and watch.batches == []
    assert math.isnan(watch.close_epoch())
    watch.remove()
    layer.train()(torch.randn(3, 400))
    assert watch.batches == []


def test_flags_against_plain_loops():
    stds = np.random.default_rng(1).normal(1, 1e-3, 40)
    slopes = [np.polyfit(range(6), stds[i:i + 6], 1)[0] for i in range(35)]
    expected = [e >= 7 and abs(slopes[e - 6] - slopes[e - 7]) <= 2e-4 for e in range(1, 41)]
    assert TrendFlag(window=6, tolerance=2e-4, epochs=40).flags(stds).tolist() == expected
    flag = SlopeFlag(window=6, threshold=1e-4, epochs=40)
    assert flag.flags(stds).tolist() == [e >= 6 and abs(stds[e - 1] - stds[e - 6])/5 <= 1e-4
        for e in range(1, 41)]
    assert flag.first(stds) == flag.flags(stds).tolist().index(True) + 1 and flag.flags(
        []).shape == (0,)


def test_chance_of_the_papers_resnet_flag():
    error = epoch_error(.5*math.sqrt(512), width=512, rows=50_000)
    assert SlopeFlag(window=10, threshold=1.5e-5, epochs=100).chance(error) == pytest.approx(
        math.erf(1.5e-5*9/(2*error)), rel=1e-6)
    assert SlopeFlag(window=10, threshold=1.5e-5, epochs=100).chance(error) < .06


@pytest.mark.parametrize("build, sentence", [
    (lambda: SlopeFlag(window=11, threshold=1e-4, epochs=10),
    "window must be <= 10 for a run of 10 epochs, got window=11"),
    (lambda: TrendFlag(window=10, tolerance=1e-4, epochs=10),
    "window must be <= 9 for a run of 10 epochs, got window=10"),
    (lambda: SlopeFlag(window=5, threshold=-1., epochs=10), "threshold must be"),
    (lambda: TrendFlag(window=5, tolerance=0., epochs=10), "tolerance must be"),
    (lambda: moving_bound(torch.ones(3), bound_ratio=0.), "bound_ratio must be"),
    (lambda: moving_bound(torch.zeros(3), bound_ratio=1.), "weight must be")])
def test_bad_flags_and_bounds(build, sentence):
    with pytest.raises(ValueError) as error: build()
    assert sentence in str(error.value)


def test_moving_bound():
    layer = SanitizationLayer(3, 1., 1.)
    assert follow_weights(layer, torch.full((3, 3), 2.),
        bound_ratio=.5) == layer.clip == pytest.approx(3.)
