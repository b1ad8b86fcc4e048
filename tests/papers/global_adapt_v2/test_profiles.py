"Profiles of paper global_adapt_v2: decays keep their shape, and every network has pinned kernels."
import pytest

from dp_companion.papers.adaptive_noise.grid import ADAPTIVE_PROFILES
from dp_companion.papers.global_adapt_v2.grid import PROFILES, method_values, profile_named
from dp_companion.training.run import pinned_kernels
from dp_companion.training.spec import build_method, run_spec

SIDES = {"digits": 8, "unbalanced_digits": 8, "two_digits": 8, "mnist": 28, "unbalanced_mnist": 28,
         "cifar10": 32, "cifar10_efficientnet": 1, "cifar100": 32,
         "synthetic_melt_pool_small": 24, "thinwall": 200}


@pytest.mark.parametrize("method", [f"DP-SGD-Global-Adapt-V2-{decay}" for decay in "LTS"])
def test_decays_fall_in_ten_epochs_as_in_a_hundred(method):
    def fall(name, epoch):
        said = method_values(profile_named(name), method)
        shape = build_method(**said, noise_multiplier=1.).noise(None)
        return shape.at(epoch)/shape.at(0)
    assert fall("laptop", 9) == pytest.approx(fall("paper", 90), rel=1e-12)


@pytest.mark.parametrize("profiles", [PROFILES, ADAPTIVE_PROFILES],
                         ids=["global_adapt_v2", "adaptive_noise"])
def test_every_profile_has_kernels_for_its_network(profiles):
    said = dict(paper="global_adapt_v2", method="DP-SGD", clip_rule="flat", noise_multiplier=1.,
                accounting="as_printed", target_epsilon=1., seed=0)
    for profile in (p for of_paper in profiles.values() for p in of_paper.values()):
        spec = run_spec(**said | profile.run_values)
        assert pinned_kernels(spec, SIDES[profile.dataset]) is not None, (profile.model, profile)
