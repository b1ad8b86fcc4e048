"Guarantees for a unit with several images: enumeration, simulation, the exact Gaussian."
import itertools
import math
import subprocess
import sys
from collections import Counter

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from dp_companion.budgets.certified import certify
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.units import (_UNIT_ORDERS, certify_group, clipped_per_unit,
                                        _group_privacy, keep_at_most, _nonprivate_unit_sizes,
                                        _rdp_unit)

SIGMA, RATE = st.floats(.4, 10), st.floats(1e-4, .9)


def event(sigma, q, steps, query="gradient"):
    return MechanismEvent(noise_multiplier=sigma, sample_rate=q, steps=steps, query=query)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 5))
def test_keep_at_most_by_hand(units, images):
    seen, want = {}, []
    for unit in units:
        seen[unit] = seen.get(unit, 0) + 1
        want.append(seen[unit] <= images)
    units = np.array(units)
    kept = keep_at_most(units, images=images)
    assert kept.tolist() == want and _nonprivate_unit_sizes(units[kept]).max() <= images
    for left_out in set(units.tolist()): # whatever one unit does, the others keep the same images
        assert keep_at_most(units[units != left_out],
                            images=images).tolist() == kept[units != left_out].tolist()


def test_units_may_be_names():
    assert keep_at_most(["b", "a", "b"], images=1).tolist() == [True, True, False]
    assert _nonprivate_unit_sizes(["b", "a", "b"]).tolist() == [1, 2]


def moment(sigma, q, k, power):
    "E_Q[(P/Q)^power] from every pattern of images in the batch, in 40 digits."
    with mpmath.workdps(40):
        sigma, q = mpmath.mpf(sigma), mpmath.mpf(q)
        drawn = Counter(sum(pattern) for pattern in itertools.product((0, 1), repeat=k))
        def ratio(x):
            return sum(patterns*q**j*(1 - q)**(k - j)*mpmath.exp((2*j*x - j**2)/(2*sigma**2))
                       for j, patterns in drawn.items())
        edges = ([sigma*z for z in range(-24, 25, 3)]
                 + [j*max(power, 1) + z*sigma for j in range(k + 1) for z in (-6, 0, 6)])
        return mpmath.quad(lambda x: mpmath.npdf(x, 0, sigma)*ratio(x)**power, sorted(set(edges)))


@pytest.mark.parametrize(("sigma", "q", "k"), [(.7, .05, 3), (2., .4, 2), (1., .016, 4)])
@pytest.mark.parametrize("order", [1.5, 2.7, pytest.param(6, marks=pytest.mark.slow)])
def test_rdp_is_the_larger_direction(sigma, q, k, order):
    removed, added = (float(mpmath.log(moment(sigma, q, k, power)))/(order - 1)
                      for power in (order, 1 - order))
    np.testing.assert_allclose(_rdp_unit(sigma, q, images=k, orders=[order])[0],
                               max(removed, added), rtol=1e-8)


def test_full_participation_is_a_gaussian():
    np.testing.assert_array_equal(_rdp_unit(2., 1, images=3), _UNIT_ORDERS*9/8)
    np.testing.assert_allclose(_rdp_unit(2., 1 - 1e-12, images=3, orders=[2, 5])[0], 9/4, rtol=1e-6)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(SIGMA, RATE, st.integers(1, 6))
def test_rdp_rises_with_images_and_stays_below_the_crude_bound(sigma, q, k):
    orders = np.array([1.5, 2, 4, 16])
    one, more = (_rdp_unit(sigma, q, images=n, orders=orders) for n in (k, k + 1))
    assert (more >= one*(1 - 1e-9) - 1e-10).all()
    all_at_once = _rdp_unit(sigma/k,
                            clipped_per_unit([event(sigma, q, 1)], images=k)[0].sample_rate,
                            images=1, orders=orders)
    assert (one <= all_at_once*(1 + 1e-9) + 1e-10).all()


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [1e-5, .03, .1])
def test_little_noise_meets_the_crude_bound(sigma):
    "Between its lower bound and the pessimistic bound, without a jump at the switch."
    rdp, orders = _rdp_unit(sigma, .1, images=6), _UNIT_ORDERS
    all_drawn = orders*36/(2*sigma**2) + orders/(orders - 1)*6*math.log(.1)
    assert (rdp >= all_drawn*(1 - 1e-9)).all()
    assert (rdp <= orders*36/(2*sigma**2)*(1 + 1e-9)).all()
    assert (np.diff(rdp) > 0).all()


def exact_gaussian(mu, delta):
    def excess(e): return special.ndtr(mu/2 - e/mu) - math.exp(e)*special.ndtr(-mu/2 - e/mu) - delta
    return optimize.brentq(excess, 0, mu*mu + 50*mu)


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "steps", "k"), [(30., 100, 6), (5., 1, 3)])
def test_full_participation_never_below_the_exact_value(sigma, steps, k):
    got = certify_group([event(sigma, 1, steps)], images=k, delta=1e-5)
    exact = exact_gaussian(k*math.sqrt(steps)/sigma, 1e-5)
    assert exact <= got["pld"].epsilon <= exact*1.002 and got["pld"].epsilon <= got["rdp"].epsilon


def simulated_delta(epsilon, draw, sigma, q, k, steps, n=400_000):
    "delta(epsilon) of a run by simulation of batches, image by image."
    sums = (draw.random((n, steps, k)) < q).sum(-1) + sigma*draw.normal(size=(n, steps))
    weights = [math.comb(k, j)*q**j*(1 - q)**(k - j) for j in range(k + 1)]
    loss = (np.log(sum(w*np.exp((2*j*sums - j*j)/(2*sigma**2)) for j, w in enumerate(weights)))
            .sum(1))
    gain = np.maximum(0, -np.expm1(epsilon - loss))
    return gain.mean(), gain.std()/math.sqrt(n)


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "q", "k", "steps"), [(1., .05, 6, 4), (3., .3, 2, 10)])
def test_a_run_against_simulation(sigma, q, k, steps):
    epsilon = certify_group([event(sigma, q, steps)], images=k, delta=.01,
                            accountants=("pld",))["pld"].epsilon
    draw = np.random.default_rng(0)
    at, noise = simulated_delta(epsilon, draw, sigma, q, k, steps)
    # removing is the worse direction here
    assert abs(at - .01) < 5*noise + 1e-4, (epsilon, at, noise)


@pytest.mark.slow
def test_one_image_is_the_ordinary_certificate():
    run = [event(1.1, .02, 200), event(.9, .02, 100), event(10., .02, 300, "count")]
    ours, theirs = certify_group(run, images=1, delta=1e-5), certify(run, delta=1e-5)
    for name in ("rdp", "pld"):
        np.testing.assert_allclose(ours[name].epsilon, theirs[name].epsilon, rtol=2e-3)
    assert ours["pld"].accountant == "pld"


@pytest.mark.slow
def test_better_than_knowing_epsilon_alone():
    run = [event(4., .02, 500)]
    epsilon, delta = _group_privacy(certify(run, delta=1e-6)["pld"].epsilon, 1e-6, images=3)
    assert delta < 1 and certify_group(run, images=3, delta=delta)["pld"].epsilon < epsilon


@pytest.mark.slow
def test_clipping_per_unit_by_simulation():
    "The share of batches that hold any image of the unit."
    draws = np.random.default_rng(0).random((200_000, 6)) < .03
    rate = clipped_per_unit([event(1., .03, 1)], images=6)[0].sample_rate
    assert abs(draws.any(1).mean() - rate) < 4*math.sqrt(rate*(1 - rate)/200_000)
    run = [event(1.5, .03, 100)]
    per_unit = certify(clipped_per_unit(run, images=6), delta=1e-3)["rdp"].epsilon
    per_image = certify_group(run, images=6, delta=1e-3)["rdp"].epsilon
    assert certify(run, delta=1e-3)["rdp"].epsilon < per_unit < per_image


def gaussian_pair_delta(epsilon, points, weights, sigma):
    "Hockey-stick divergence of a mixture at `points` from a Gaussian at 0, by a fine sum."
    x = np.arange(-12, 14, 1e-3)[:, None]
    phi = lambda centre: np.exp(-(x - centre)**2/(2*sigma**2))/(sigma*math.sqrt(2*math.pi))
    return np.maximum((phi(np.array(points))*weights).sum(1) - math.exp(epsilon)*phi(0)[:, 0],
                      0).sum()*1e-3


@pytest.mark.slow
@pytest.mark.parametrize("combine", ["mean then clip", "sum then clip", "mean of clipped"])
def test_sampled_and_clipped_per_unit_by_enumeration(combine):
    "Units of one to four images with any gradients stay below the sampled Gaussian's delta."
    draw, q, sigma = np.random.default_rng(1), .3, 1.1
    worst = {epsilon: gaussian_pair_delta(epsilon, [0, 1], [1 - q, q], sigma)
             for epsilon in (.3, 1.)}
    for epsilon in worst:
        np.testing.assert_allclose(certify([event(sigma, q, 1)],
                                           delta=worst[epsilon])["pld"].epsilon, epsilon, rtol=1e-3)
    for _ in range(20):
        gradients = draw.normal(scale=3, size=draw.integers(1, 5))
        clip = lambda g: g/np.maximum(1, np.abs(g))
        moved = {"mean then clip": clip(gradients.mean()), "sum then clip": clip(gradients.sum()),
                 "mean of clipped": clip(gradients).mean()}[combine]
        for epsilon in worst:
            assert gaussian_pair_delta(epsilon, [0, abs(moved)], [1 - q, q],
                                       sigma) <= worst[epsilon] + 1e-9


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.floats(.01, 5), st.floats(1e-9, .5), st.integers(1, 8))
def test_group_privacy_is_the_sum(epsilon, delta, k):
    total, out = _group_privacy(epsilon, delta, images=k)
    assert total == k*epsilon
    np.testing.assert_allclose(out, min(1, delta*sum(math.exp(j*epsilon) for j in range(k))),
                               rtol=1e-9)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: certify_group([], images=True, delta=.1),
     "images must be a whole number >= 1"),
    (lambda: certify_group([], images=2.0, delta=.1),
     "images must be a whole number >= 1"),
    (lambda: certify_group([], images=2, delta=0),
     "delta must be in (0, 1), got delta=0"),
    (lambda: certify_group([], images=2, delta=.1, accountants="pld"),
     "accountants must be a tuple of names"),
    (lambda: certify_group([], images=2, delta=.1, accountants=("moments",)),
     "accountants must be one of rdp, pld"),
    (lambda: _rdp_unit(1., .1, images=2, orders=[1.0]),
     "orders must be one row of finite numbers > 1"),
    (lambda: _rdp_unit(math.nan, .1, images=2),
     "noise_multiplier must be finite and > 0"),
    (lambda: clipped_per_unit([], images=0),
     "images must be a whole number >= 1, got images=0"),
    (lambda: keep_at_most([1], images=-1),
     "images must be a whole number >= 1"),
    (lambda: _group_privacy(1., 1., images=2), "delta must be in (0, 1)")])
def test_errors_are_sentences(call, sentence):
    with pytest.raises(ValueError) as error:
        call()
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_nothing_is_certified_for_nothing():
    assert (certify_group([], images=3, delta=.1)["pld"].epsilon == 0
            == certify_group([event(1., .1, 0)], images=3, delta=.1)["rdp"].epsilon)


def test_without_torch():
    subprocess.run([sys.executable, "-c",
                    "import sys, dp_companion.budgets.units; assert 'torch' not in sys.modules"],
                   check=True)
