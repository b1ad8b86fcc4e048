"Specs: every method of every paper makes one, and it survives a file."
import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_companion.papers.adaptive_noise.grid import (
    ADAPTIVE_METHODS, adaptive_profile, adaptive_values
)
from dp_companion.papers.bounded_adaptive.grid import (
    BOUNDED_METHODS, bounded_profile, bounded_values
)
from dp_companion.papers.global_adapt_v2.grid import METHODS, method_values, profile_named
from dp_companion.papers.sad.grid import SAD_METHODS, sad_profile, sad_values
from dp_companion.training.spec import run_spec, spec_from_dict

GRIDS = {
    "global_adapt_v2": (METHODS, profile_named, method_values),
    "sad": (SAD_METHODS, sad_profile, sad_values),
    "adaptive_noise": (ADAPTIVE_METHODS, adaptive_profile, adaptive_values),
    "bounded_adaptive": (BOUNDED_METHODS, bounded_profile, bounded_values),
}
CASES = [(paper, method) for paper, (methods, *_) in GRIDS.items() for method in methods]


def spec_of(paper, method, **changes):
    _, profile, values = GRIDS[paper]
    said = values(profile("digits"), method)
    if said["clip_rule"] == "none": return run_spec(**said, accounting="none", seed=0, **changes)
    if said.get("adapt_to") == "loss": said["signal_noise"] = 8.
    return run_spec(**said, accounting="certified", target_epsilon=3., noise_multiplier=2., seed=0,
                    **changes)


@pytest.mark.parametrize("paper, method", CASES)
def test_a_method_of_a_paper_survives_a_file(paper, method):
    spec = spec_of(paper, method)
    assert spec_from_dict(json.loads(json.dumps(asdict(spec)))) == spec
    assert run_spec(**spec.values) == spec


def test_names_of_different_methods_differ():
    specs = [spec_of(*case) for case in CASES]
    assert len({spec.name for spec in specs}) == len(specs)


def test_names_stay_what_they_were():
    said = dict(paper="global_adapt_v2", method="DP-SGD", dataset="digits", model="mnist_cnn",
                clip_rule="flat", noise_multiplier=1., accounting="as_printed", target_epsilon=1.,
                epochs=2, expected_batch_size=64, seed=0)
    assert run_spec(**said).name == "371545b65d63d758"


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(-4e-8, 4e-8))
def test_a_name_ignores_the_seventh_digit_alone(sigma, error):
    spec = spec_of("global_adapt_v2", "DP-SGD")
    rounded = float(f"{sigma:.6g}") # away from the edge between two roundings
    named = replace(spec, method=replace(spec.method, noise_multiplier=rounded)).name
    near, far = (replace(spec, method=replace(spec.method, noise_multiplier=rounded*(1 + by))).name
                 for by in (error, 2e-5))
    assert named == near != far
