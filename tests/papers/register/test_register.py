"The register: every file, its verdict, and ten and more claims by other accountants."
import json
import math
import time
from dataclasses import replace

import dp_accounting
import pytest
from scipy.optimize import brentq
from scipy.special import ndtr

from dp_companion.papers.register import _ORDERS, recompute, recompute_all
from dp_companion.papers.register.page import register_csv, register_html
from dp_companion.papers.register.schema import read_claim, register

# verdict, and the verdict for the batches that the code forms; a new claim is a line here
HOLDS, UNDER, MORE, SILENT = "holds", "understated", "overstated", "not enough said"
VERDICTS = {
    **{f"abadi_mnist_{size}_noise": (SILENT, "") for size in ("large", "medium", "small")},
    "abadi_moments": (HOLDS, ""),
    "adaptive_noise_cifar10_0_5": (SILENT, ""), "adaptive_noise_cifar10_1_0": (SILENT, ""),
    "bounded_adaptive_mnist": (SILENT, ""),
    "de_cifar10_finetune": (HOLDS, ""), "de_cifar10_scratch": (HOLDS, ""),
    "de_imagenet_scratch": (HOLDS, ""), "dp_randp_cifar10": (HOLDS, ""),
    "dynamic_dp_mnist_dynamic": (SILENT, ""), "dynamic_dp_mnist_static": (HOLDS, ""),
    "gdp_clt_20_epochs": (UNDER, ""), "gdp_clt_70_epochs": (UNDER, ""),
    "gdp_moments_20_epochs": (HOLDS, ""), "gdp_moments_70_epochs": (HOLDS, ""),
    **{f"global_adapt_v2_{row}": (UNDER, "") for row in (
        "decay_rate_0_1", "decay_rate_0_25", "decay_rate_0_5", "decay_rate_0_75",
        "decay_rate_0_9", "drop_every_5", "drop_every_10", "drop_every_20", "drop_every_25",
        "drop_every_50")},
    "handcrafted_cnn_cifar10": (HOLDS, UNDER), "handcrafted_cnn_fashion": (HOLDS, UNDER),
    "handcrafted_cnn_mnist": (HOLDS, UNDER), "handcrafted_scatternet_cifar10": (SILENT, ""),
    "handcrafted_transfer_resnext": (SILENT, ""), "handcrafted_transfer_simclr": (SILENT, ""),
    "mls_bench_cifar10": (UNDER, UNDER), "mls_bench_cifar10_decay": (UNDER, UNDER),
    "mls_bench_mnist": (UNDER, UNDER), "mls_bench_mnist_decay": (UNDER, UNDER),
    **{f"opacus_2021_mnist_{epochs}_epochs": (HOLDS, "") for epochs in (15, 45, 60)},
    "opacus_ddp": (HOLDS, ""), "opacus_image_classifier": (HOLDS, ""),
    "opacus_lstm": (MORE, ""), "opacus_lstm_2021": (HOLDS, ""),
    "opacus_lstm_tutorial": (SILENT, ""),
    **{f"opacus_mnist_{epochs}_epochs": (HOLDS, "") for epochs in (15, 45, 60)},
    "opacus_mnist_first_epoch": (MORE, ""), "opacus_text_classifier": (SILENT, ""),
    **{f"sad_ham10000_{epsilon}": (SILENT, "") for epsilon in (3, 8, 16)},
    **{f"sanitization_{run}": (UNDER, "") for run in (
        "cnn_cifar10_50", "cnn_cifar10_57", "cnn_cifar10_100", "cnn_mnist_100",
        "resnet_cifar10_30", "resnet_cifar10_51", "resnet_cifar10_82", "resnet_cifar10_100")},
    "scalenorm_cifar10": (SILENT, ""), "smoothnet_cifar10": (SILENT, ""),
    "tan_cifar10": (HOLDS, ""), "tan_imagenet": (HOLDS, ""),
    "tempered_sigmoids_cifar10": (SILENT, ""), "tff_adaptive_clipping": (HOLDS, ""),
    "tfp_2019_mnist_10_epochs": (MORE, UNDER), "tfp_2019_mnist_30_epochs": (HOLDS, UNDER),
    "tfp_2019_mnist_60_epochs": (HOLDS, UNDER), "tfp_classification_tutorial": (MORE, UNDER),
    "tfp_keras_tutorial_issue": (MORE, ""), "tfp_mnist_15_epochs": (HOLDS, UNDER),
    "tfp_mnist_45_epochs": (HOLDS, UNDER), "tfp_mnist_60_epochs": (HOLDS, UNDER),
    "tfp_mnist_first_epoch": (MORE, UNDER), "tfp_mnist_second_epoch": (MORE, UNDER)}


@pytest.fixture(scope="module")
def recomputed():
    started = time.process_time()
    found = {r.name: r for r in recompute_all()}
    return found, time.process_time() - started


@pytest.mark.slow
def test_every_claim_has_its_verdict_and_all_take_a_minute(recomputed):
    found, seconds = recomputed
    assert {name: (r.verdict, r.as_run) for name, r in found.items()} == VERDICTS
    assert len(found) >= 30 and seconds < 60


@pytest.mark.slow
def test_bounds_are_in_order(recomputed):
    for r in recomputed[0].values():
        if r.rdp is None: continue
        assert r.pld <= r.rdp*1.001, r.name
        assert r.pld <= r.replaced*1.001, r.name
        sampled_as_poisson = register()[r.name].sampling == "poisson"
        if r.lower and sampled_as_poisson: assert r.lower <= r.pld, r.name


# what the sources print, by the accountants that they name
BY_OPACUS = {"sanitization_resnet_cifar10_30": 2.341, "sanitization_resnet_cifar10_51": 3.092,
             "sanitization_resnet_cifar10_82": 3.999, "sanitization_resnet_cifar10_100": 4.462,
             "sanitization_cnn_cifar10_50": .852, "sanitization_cnn_cifar10_57": .886,
             "sanitization_cnn_cifar10_100": 1.096, "opacus_ddp": 1.21, "tan_imagenet": 7.98,
             "de_cifar10_finetune": .998, "tff_adaptive_clipping": 1.986}


@pytest.mark.parametrize("name", BY_OPACUS)
def test_rdp_is_opacus_rdp(name):
    "Eleven claims to three digits by Opacus's own accountant."
    analysis = pytest.importorskip("opacus.accountants.analysis.rdp")
    claim = register()[name]
    rdp = sum(analysis.compute_rdp(q=e.sample_rate, noise_multiplier=e.noise_multiplier,
                                   steps=e.steps, orders=_ORDERS)
              for e in claim.accounted_events)
    epsilon, _ = analysis.get_privacy_spent(orders=_ORDERS, rdp=rdp, delta=claim.delta)
    assert epsilon == pytest.approx(BY_OPACUS[name], abs=6e-4 if name != "opacus_ddp" else 6e-3)


BY_PLD = ("abadi_moments", "de_cifar10_scratch", "dp_randp_cifar10", "gdp_clt_70_epochs",
          "gdp_moments_20_epochs", "handcrafted_cnn_cifar10", "opacus_mnist_60_epochs",
          "tff_adaptive_clipping", "tfp_mnist_15_epochs", "tan_cifar10")


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_PLD)
def test_pld_is_dp_accountings(name, recomputed):
    "Ten claims by dp-accounting's accountant on its own grid."
    claim, accountant = register()[name], dp_accounting.pld.PLDAccountant()
    for e in claim.events:
        step = dp_accounting.GaussianDpEvent(e.noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(e.sample_rate, step), e.steps)
    assert recomputed[0][name].pld == pytest.approx(accountant.get_epsilon(claim.delta), rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in VERDICTS if n.startswith("sanitization")])
def test_released_rows_by_hand(name, recomputed):
    "T rows are one Gaussian with mu = sqrt(T), whose profile is known."
    mu, claim = math.sqrt(register()[name].noise[0][1]), register()[name]
    exact = brentq(lambda e: ndtr(mu/2 - e/mu) - math.exp(e)*ndtr(-mu/2 - e/mu) - claim.delta,
                   0, 200)
    assert recomputed[0][name].lower == pytest.approx(exact, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdp_clt_20_epochs", "global_adapt_v2_drop_every_10",
                                  "sanitization_resnet_cifar10_30"])
def test_the_multiplier_makes_the_claim_true(name, recomputed):
    claim, needed = register()[name], recomputed[0][name].multiplier
    factor = needed/claim.noise[0][0]
    louder = tuple((factor*sigma, steps) for sigma, steps in claim.noise)
    assert recompute(replace(claim, noise=louder)).verdict == HOLDS
    quieter = tuple((.8*sigma, steps) for sigma, steps in louder)
    assert recompute(replace(claim, noise=quieter)).verdict != HOLDS


def test_a_file_outside_the_register_is_a_claim_too(tmp_path):
    content = {"title": "T", "source": "S", "version": "v1", "place": "Table 1", "says": "C",
               "epsilon": "0.5", "delta": 1e-5, "neighbouring_relation": "replace_one",
               "privacy_unit": "one row", "dataset": "D", "dataset_size": 100, "batch_size": 100,
               "sampling": "poisson", "noise": [[4.0, 1]], "clipping": "flat", "accountant": "?"}
    path = tmp_path/"mine.json"
    path.write_text(json.dumps(content))
    found = recompute(read_claim(path)) # one Gaussian at distance 2/4
    exact = brentq(lambda e: ndtr(.25 - 2*e) - math.exp(e)*ndtr(-.25 - 2*e) - 1e-5, 0, 20)
    assert found.replaced == pytest.approx(exact, rel=1e-3)
    assert (found.verdict, found.name) == (UNDER, "mine")
    path.write_text(json.dumps({**content, "batchsize": 3}))
    with pytest.raises(ValueError, match="did you mean batch_size"): read_claim(path)


@pytest.mark.slow
def test_the_page_and_the_file_have_every_claim(recomputed):
    rows = list(recomputed[0].values())
    page, text = register_html(rows), register_csv(rows)
    assert all(f'id="claim-{name}"' in page and f"\n{name}," in text for name in VERDICTS)
    assert "http" not in page.split("<details")[0].replace("data:text", "")


def test_nothing_is_inferred_without_a_word():
    for name, claim in register().items():
        stated = claim.inferred or "The source states all of it" in claim.note
        assert stated or not claim.noise, f"{name} states everything; say so in a note"
        assert all(len(how) > 10 for how in claim.inferred.values()), name


@pytest.mark.parametrize("name, epsilon", [("mls_bench_mnist", 3.0016),
                                           ("mls_bench_mnist_decay", 3.0016),
                                           ("mls_bench_cifar10", 2.9986),
                                           ("mls_bench_cifar10_decay", 2.9986)])
def test_mls_bench_by_its_own_formula(name, epsilon):
    "The leaderboard's digits: sum of q²α/(2σ²), with the task's conversion and orders."
    claim = register()[name]
    total = sum(e.steps*(e.sample_rate/e.noise_multiplier)**2/2 for e in claim.events)
    found = min(a*total - math.log(claim.delta)/(a - 1) + math.log1p(-1/a) for a in _ORDERS)
    assert found == pytest.approx(epsilon, abs=6e-5)
