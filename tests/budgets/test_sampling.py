"Bounds for batches that are not Poisson: second accountants, simulations and limits."
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant

from dp_companion.budgets.certified import certify
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.sampling import (
    _RELATIONS, SAMPLINGS, _balls_profiles, _largest, _sum_of_losses, known_epsilon)


def event(sigma, q, steps):
    return MechanismEvent(noise_multiplier=sigma, sample_rate=q, steps=steps)


def known(sampling, relation, *events, delta=1e-5):
    return known_epsilon(events, delta=delta, sampling=sampling, neighbouring_relation=relation)


PAIRS = [(s, r) for s in SAMPLINGS for r in _RELATIONS[s]]


@pytest.mark.slow
@pytest.mark.parametrize("sampling, relation", PAIRS)
def test_bounds_are_in_order_and_monotone(sampling, relation):
    found = [known(sampling, relation, event(s, .05, t)) for s, t in ((1., 200), (2., 200),
                                                                      (2., 100))]
    assert all(0 <= k.lower <= k.upper for k in found)
    assert found[0].upper > found[1].upper > found[2].upper
    assert found[0].lower > found[1].lower >= found[2].lower


@pytest.mark.slow
@pytest.mark.parametrize("relation", _RELATIONS["poisson"])
@pytest.mark.parametrize("sigma, q, steps", [(.7, .01, 400), (3., .2, 50), (1., 1., 4)])
def test_poisson_bounds_enclose_a_second_accountant(sigma, q, steps, relation):
    "dp-accounting's own accountant, on its default grid."
    accountant = dp_accounting.pld.PLDAccountant(
        dp_accounting.NeighboringRelation[relation.upper()])
    step = dp_accounting.GaussianDpEvent(sigma)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, step), steps)
    found = known("poisson", relation, event(sigma, q, steps))
    assert found.lower <= accountant.get_epsilon(1e-5)*1.001
    assert found.upper == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-3)
    assert found.lower > .9*found.upper


@pytest.mark.parametrize("sigma, size, steps", [(2., 100, 50), (4., 500, 20)])
def test_fixed_size_is_not_above_rdp(sigma, size, steps):
    accountant = RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    step = dp_accounting.GaussianDpEvent(sigma/2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, size, step), steps)
    found = known("fixed_size", "replace_one", event(sigma, size/1000, steps))
    assert found.lower <= found.upper <= accountant.get_epsilon(1e-5)


@pytest.mark.slow
def test_two_phases_of_noise_lie_between_the_phases():
    for sampling, relation in PAIRS:
        phases = [event(1.5, .1, 100), event(3., .1, 100)]
        both = known(sampling, relation, *phases)
        weak, strong = (known(sampling, relation, event(s, .1, 200)) for s in (1.5, 3.))
        assert strong.upper < both.upper < weak.upper, sampling


def test_balls_in_bins_by_simulation():
    "The threshold test on the density ratio of one epoch, drawn in ten dimensions."
    rng, sigma, bins = np.random.default_rng(1), 1., 10
    interval = .01
    removed, added = _balls_profiles(event(sigma, 1/bins, bins), interval)
    middle = len(removed)//2
    x = rng.normal(size=(200_000, bins))
    ratio = np.exp(x/sigma - .5/sigma**2).mean(1)
    for k in (0, 30, 60):
        values = np.maximum(ratio - math.exp(k*interval), 0)
        drawn, error = values.mean(), values.std()/math.sqrt(len(values))
        assert abs(removed[middle + k] - drawn) < 4*error + 1e-6
        values = np.maximum(1 - math.exp(k*interval)*ratio, 0)
        drawn, error = values.mean(), values.std()/math.sqrt(len(values))
        assert abs(added[middle + k] - drawn) < 4*error + 1e-6


def test_the_largest_output_is_what_its_formula_says():
    rng, sigma, bins = np.random.default_rng(2), .8, 7
    edges = np.array([-np.inf, .5, 1., 1.5, 2., 2.5, np.inf])
    drawn = rng.normal(size=(100_000, bins))*sigma
    drawn[:, 3] += 2 # in whichever batch
    got = np.histogram(drawn.max(1), edges)[0]/len(drawn)
    np.testing.assert_allclose(got, _largest(event(sigma, 1/bins, bins), 2, edges), atol=6e-3)


def test_a_dropped_batch_protects():
    "With 10 of 95 records a batch, five records take no part; they are protected entirely."
    kept, dropped = event(1., .1, 90), event(1., 10/95, 90)
    edges = np.array([-np.inf, 1.5, np.inf])
    assert _largest(dropped, 2, edges)[1] < _largest(event(1., 1/9, 9), 2, edges)[1]
    assert known("shuffled", "replace_one", kept).lower > 0


def test_shuffled_is_at_least_twice_poisson_in_a_common_setting():
    "TensorFlow Privacy's MNIST tutorial; arXiv 2411.10614 finds gaps of up to four by attacks."
    run = event(1.1, 256/60_000, 234*60)
    poisson = certify([run], delta=1e-5, accountants=("rdp",))["rdp"].epsilon
    assert known("shuffled", "replace_special", run).lower > 2*poisson


def test_the_sum_of_losses_keeps_mean_and_variance():
    mass = np.array([.1, .2, .3, .4])
    lowest, total = _sum_of_losses([(-1, mass, 50), (3, mass[::-1], 2)], 1.)
    at = lowest + np.arange(len(total))
    means = [(k + np.arange(4)) @ m for k, m in ((-1, mass), (3, mass[::-1]))]
    assert (at @ total) == pytest.approx(50*means[0] + 2*means[1])
    assert total.sum() == pytest.approx(1)


@pytest.mark.parametrize("sampling, relation, text", [
    ("fixed_size", "add_or_remove_one", "must be replace_one for sampling=fixed_size"),
    ("balls_in_bins", "replace_one", "must be add_or_remove_one or replace_special"),
    ("shuffled", "add_or_remove_one", "must be replace_special or replace_one"),
    ("random", "replace_one", "sampling must be")])
def test_what_has_no_bound_is_refused_in_one_sentence(sampling, relation, text):
    with pytest.raises(ValueError, match=text):
        known(sampling, relation, event(1, .1, 10))


def test_nothing_run_is_nothing_spent():
    for sampling, relation in PAIRS:
        assert known(sampling, relation, event(1, .1, 0)).upper == 0
