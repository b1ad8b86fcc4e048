"Noise on outputs: exact, against PLD."
import math

import mpmath
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_companion.budgets.certified import certify
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.outputs import (_MECHANISMS, count_error, gaussian_std, laplace_scale)

properties = settings(derandomize=True, max_examples=60, deadline=None)


def step(noise_multiplier, sample_rate=0.01, steps=1):
    return MechanismEvent(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)


@properties
@given(st.floats(1e-3, 1e3), st.floats(0.01, 50), st.floats(1e-12, 0.5))
def test_gaussian_meets_delta_and_barely(sensitivity, epsilon, delta):
    sigma = gaussian_std(sensitivity, target_epsilon=epsilon, delta=delta)
    with mpmath.workdps(50):
        def exact(s):
            m = mpmath.mpf(sensitivity)/s
            def phi(x): return mpmath.erfc(-x/mpmath.sqrt(2))/2
            return phi(m/2 - epsilon/m) - mpmath.exp(epsilon)*phi(-m/2 - epsilon/m)
        assert exact(sigma) <= delta*(1 + 1e-8) and exact(sigma*(1 - 1e-5)) > delta


def test_gaussian_agrees_with_pld():
    for epsilon, delta in ((0.5, 1e-5), (1, 1e-3), (8, 1e-6)):
        sigma = gaussian_std(1.0, target_epsilon=epsilon, delta=delta)
        found = certify([step(sigma, 1)], delta=delta, accountants=("pld",))["pld"].epsilon
        assert epsilon*(1 - 1e-6) <= found <= epsilon*(1 + 1e-3)


def test_laplace_agrees_with_pld():
    from dp_accounting.pld import privacy_loss_distribution as pld
    for epsilon in (0.3, 1.0, 4.0):
        b = laplace_scale(2.0, target_epsilon=epsilon)
        found = pld.from_laplace_mechanism(b/2.0, value_discretization_interval=1e-4)
        for at in (0.1*epsilon, 0.7*epsilon, 1.01*epsilon):
            exact = max(0, 1 - math.exp((at - epsilon)/2))
            np.testing.assert_allclose(exact, found.get_delta_for_epsilon(at), atol=1e-4)


def test_errors_in_their_order():
    for epsilon in (0.1, 1, 5):
        for records in (10, 10_000):
            errors = {m: count_error(m, records=records, epsilon=epsilon).std for m in _MECHANISMS}
            assert (errors["local randomized response"] < errors["local laplace"]
                    < errors["local gaussian"])
            # not so for 10 records at epsilon 5
            if records == 10_000:
                assert errors["central laplace"] < errors["local randomized response"]
            np.testing.assert_allclose(errors["local gaussian"],
                                       math.sqrt(records)*errors["central gaussian"], rtol=1e-12)
