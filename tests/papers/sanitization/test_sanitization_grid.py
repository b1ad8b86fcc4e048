"The grid of paper sanitization: networks, noise and public widths."
import pytest
import torch

from dp_companion.budgets.released_rows import RowRelease, sanitization_report
from dp_companion.papers.sanitization.attacks import worst_case
from dp_companion.papers.sanitization.grid import (
    FEATURE_PROFILES, LAYER_PROFILES, claim_of, layer_specs, printed_values, public_width, row_noise
)
from dp_companion.papers.sanitization.run import build_layer, build_layered, layer_report
from dp_companion.training.spec import run_spec
from sanitized_runs import SIZE


def test_networks_of_the_profiles_can_be_built():
    for name, profiles in LAYER_PROFILES.items():
        for size in profiles.values():
            if size.model == "sanitization_resnet18": continue # slow to build
            spec = run_spec(**printed_values(size), seed=0)
            model = build_layered(spec, worst_case(size.dataset, True, records=2),
                                  build_layer(spec, torch.Generator()))
            assert model(worst_case(size.dataset, True, records=2).train_images).shape == (2, 10)
            assert spec.target_epsilon == claim_of(size)


@pytest.mark.slow
def test_versions_on_features_are_certified_for_their_target(tmp_path):
    methods = ("Frozen", "One release", "DP-SGD below")
    for spec in layer_specs(FEATURE_PROFILES["digits"], methods=methods, target_epsilon=8.,
                            runs=tmp_path)[::2]:
        data = worst_case(spec.dataset, True, records=2)
        model = build_layered(spec, data, layer := build_layer(spec, torch.Generator()))
        assert model(data.train_images).shape == (2, 10) and layer.rows == "nonnegative"
        plan = FEATURE_PROFILES["digits"].plan_of(vars(spec))
        found = layer_report(spec, plan, model).certified["pld"].epsilon
        assert .97*spec.target_epsilon < found <= spec.target_epsilon


def test_noise_never_overshoots_and_width_is_public():
    for target in (.5, 3., 8.):
        for releases in (1, 10):
            sigma = row_noise(releases, target, 1e-5)
            found = sanitization_report(RowRelease(width=25, noise_multiplier=sigma,
                releases=releases, rows="nonnegative"), SIZE.plan, below="frozen",
                delta=1e-5).epsilon
            assert target*(1 - 1e-3) <= found <= target
    widths = [public_width(s, SIZE) for s in (10., 1., .5, .1)]
    assert widths == sorted(widths) and widths[0] == 4 and widths[-1] == 49
