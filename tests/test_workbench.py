"Training: losses, fairness, data sets, models, optimizers and learning rates, across modules and on files that go wrong."
import hashlib
import io
import math
import os
import pickle
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import cross_entropy
from torchvision.datasets import CIFAR10
from torchvision.datasets import utils as tvutils

from dp_companion.algorithms.clipping import clip_rule
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.published import load
from dp_companion.training import datasets, image_folders, melt_pools, models
from dp_companion.training.datasets import load_cifar, load_dataset, load_image_folder, load_unbalanced_digits, thinned, where
from dp_companion.training.fairness import fairness_metrics, group_accuracies, macro_roc_auc, privacy_cost_gap
from dp_companion.papers.global_adapt_v2.grid import PROFILES, method_values, profile_named
from dp_companion.papers.adaptive_noise.grid import ADAPTIVE_PROFILES
from dp_companion.training.losses import build_loss, focal_loss
from dp_companion.training.models import build_model
from dp_companion.training.optimizers import LR_SCHEDULERS, OPTIMIZERS, build_lr_scheduler, build_optimizer, observe
from dp_companion.training.spec import build_method, run_spec
from dp_companion.training.run import KERNELS
from dp_companion.training.training import train
from oracles.opacus_engines import ORACLES

properties = settings(derandomize=True, max_examples=40, deadline=None)
SMALL = ["mnist_cnn", "unbalanced_mnist_cnn", "small_shufflenet", "cifar_cnn", "small_resnet"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    "No test reads or writes the user's cache."
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path/"cache"))


# Losses

@properties
@given(st.lists(st.floats(-200, 200), min_size=3, max_size=3), st.integers(0, 2), st.floats(0, 5), st.floats(0, 10))
def test_focal_loss_lies_between_zero_and_weighted_cross_entropy(logits, target, gamma, alpha):
    logits, target = torch.tensor([logits], dtype=torch.float64, requires_grad=True), torch.tensor([target])
    loss, ceiling = focal_loss(logits, target, alpha=alpha, gamma=gamma), alpha*cross_entropy(logits, target)
    assert 0 <= loss.item() <= ceiling.item()*(1 + 1e-9)
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_focal_loss_in_a_private_step():
    data, loss_fn = load_dataset("digits"), build_loss("focal", alpha=tuple(np.linspace(.1, 1, 10)), gamma=2.)
    model = build_model("unbalanced_mnist_cnn", seed=0, image_size=8).double()
    images, labels = data.train_images[:32].double(), data.train_labels[:32]
    ordinary = torch.autograd.grad(loss_fn(model(images), labels), list(model.parameters()))
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.), clip_rule=clip_rule("flat", max_grad_norm=1e9), expected_batch_size=32)
    report = step(loss_fn, images, labels, noise_multiplier=0.)
    for p, g in zip(step.model.parameters(), ordinary): torch.testing.assert_close(p.grad, g, rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(report.nonprivate_losses.double(), loss_fn(model(images), labels, reduction="none").detach(), rtol=1e-5, atol=1e-7)


def test_a_loss_can_be_sent_to_another_process():
    loss = pickle.loads(pickle.dumps(build_loss("focal", gamma=1.)))
    assert loss(torch.zeros(2, 2), torch.tensor([0, 1])).item() == pytest.approx(.5*math.log(2))


# Fairness

def test_published_gaps_follow_from_the_published_group_accuracies():
    rows = load("global_adapt_v2").query("dataset == 'Thinwall' and item in ['Table 7', 'Table 8', 'Table 9', 'Table 10', 'Table 11', 'Table 12']")
    table = rows.fillna({"epsilon": 0}).pivot(index=["method", "epsilon"], columns="metric", values="value")
    groups = [{m: row[f"accuracy_group_{m}"] for m in ("porous", "nonporous")} for _, row in table.iterrows()]
    base = groups[list(table.index).index(("Non-DP", 0))]
    for run, printed in zip(groups, table.privacy_cost_gap):
        if not math.isnan(printed): assert privacy_cost_gap(base, [run], "porous", "nonporous") == pytest.approx(printed, abs=6e-4)


@properties
@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_auc_ignores_the_scale_of_two_class_logits_and_groups_average_to_accuracy(classes, seed):
    draw = torch.Generator().manual_seed(seed)
    labels, logits = torch.arange(60) % classes, torch.randn(60, classes, generator=draw)
    metrics = fairness_metrics(logits, labels)
    weighted = sum(share*(labels == m).double().mean().item() for m, share in group_accuracies(logits.argmax(1), labels).items())
    assert metrics["accuracy"] == pytest.approx(weighted) and 0 <= metrics["auc"] <= 1
    if classes == 2: assert macro_roc_auc(logits/7, labels) == pytest.approx(metrics["auc"], abs=1e-9)
    assert macro_roc_auc(torch.nn.functional.one_hot(labels, classes).float(), labels) == 1


def test_fairness_of_a_data_set_uses_its_class_names():
    data = load_dataset("synthetic_melt_pool_small")
    logits = build_model("small_shufflenet", seed=0, image_size=24)(data.test_images)
    assert list(fairness_metrics(logits.detach(), data.test_labels, data.class_names)) == ["accuracy", "auc", "accuracy_group_nonporous", "accuracy_group_porous"]


# Data sets

def write_images(folder, pixels, suffix="png", classes=("cat", "dog")):
    for k, place in enumerate(f"{part}/{c}" for part in ("train", "test") for c in classes):
        (folder/place).mkdir(parents=True)
        Image.fromarray(pixels[k]).save(folder/place/f"0.{suffix}")
    return folder


@pytest.fixture
def pixels(): return np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)


def test_an_image_folder_is_decoded_once_and_again_after_a_change(tmp_path, pixels, monkeypatch):
    folder, read = write_images(tmp_path/"pets", pixels), []
    monkeypatch.setattr(image_folders, "_pixels", lambda path, real=image_folders._pixels: read.append(path) or real(path))
    first = load_image_folder(folder, name="pets", source="made here")
    load_image_folder(folder, name="pets", source="made here")
    assert len(read) == 4
    Image.fromarray(pixels[3]).save(folder/"train"/"cat"/"1.png")
    assert len(load_image_folder(folder, name="pets", source="made here").train_labels) == 3 and len(read) == 9
    assert len(first.train_labels) == 2


def test_two_folders_with_one_listing_do_not_share_a_cache(tmp_path, pixels):
    a, b = write_images(tmp_path/"a"/"pets", pixels, "png"), write_images(tmp_path/"b"/"pets", pixels[::-1], "png")
    for p in [*a.rglob("*.png"), *b.rglob("*.png")]: os.utime(p, ns=(1, 1))
    assert not torch.equal(*(load_image_folder(f, name="pets", source="").train_images for f in (a, b)))


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, pixels, monkeypatch):
    (tmp_path/"file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path/"file"))
    write_images(tmp_path/"cifar10", pixels)
    assert len(load_dataset("cifar10", tmp_path).train_labels) == 2


def test_a_killed_writer_leaves_no_half_cache(tmp_path, pixels, monkeypatch):
    folder = write_images(tmp_path/"pets", pixels)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt): load_image_folder(folder, name="pets", source="")
    assert not list((tmp_path/"cache").rglob("*.*"))


def test_a_reencoded_cifar_says_so_and_a_lossless_one_does_not(tmp_path, pixels):
    write_images(tmp_path/"cifar10", pixels, "jpg"); write_images(tmp_path/"cifar100", pixels, "png")
    assert "re-encoded as JPEG" in load_cifar(tmp_path, classes=10).source
    assert "re-encoded" not in load_cifar(tmp_path, classes=100).source


def small_cifar(tmp_path, monkeypatch, pixels):
    "An archive of torchvision's layout with one training batch, and torchvision told of its sums."
    def batch(images): return pickle.dumps({"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), "labels": list(range(len(images)))}, protocol=2)
    files = {"data_batch_1": batch(pixels[:3]), "test_batch": batch(pixels[3:]), "batches.meta": pickle.dumps({"label_names": list("abcdefghij")}, protocol=2)}
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    archive = tmp_path/CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}"); entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    monkeypatch.setitem(datasets.ARCHIVE_SHA256, CIFAR10.filename, hashlib.sha256(archive.read_bytes()).hexdigest())
    return tmp_path/CIFAR10.base_folder


def test_original_batches_are_read_through_torchvision(tmp_path, monkeypatch, pixels):
    folder = small_cifar(tmp_path, monkeypatch, pixels)
    data = load_cifar(tmp_path, classes=10)
    assert folder.is_dir() and data.train_images.shape == (3, 3, 32, 32) and data.train_labels.tolist() == [0, 1, 2] and data.class_names == tuple("abcdefghij")
    scale = (data.test_images[0]*torch.tensor(datasets.RGB_STD)[:, None, None] + torch.tensor(datasets.RGB_MEAN)[:, None, None])*255
    np.testing.assert_allclose(scale.permute(1, 2, 0), pixels[3], atol=1e-3)


@pytest.mark.parametrize("damage,sentence", [
    (lambda f: (f/"data_batch_1").write_bytes(pickle.dumps({"data": 1}, protocol=2)), "got one with another MD5"),
    (lambda f: (f/"data_batch_1").write_bytes(pickle.dumps(partial(os.system, "exit 1"), protocol=2)), "must hold numpy arrays only, got 'functools partial'"),
    (lambda f: (f/"data_batch_1").write_bytes(pickle.dumps(partial(os.system, "exit 1"), protocol=4)), "must hold numpy arrays only, got 'STACK_GLOBAL'"),
    (lambda f: (f/"test_batch").write_bytes((f/"test_batch").read_bytes()[:50]), "must be a whole pickle"),
    (lambda f: (f/"batches.meta").unlink(), "must hold batches.meta"),
])
def test_damaged_batches_are_not_unpickled(tmp_path, monkeypatch, pixels, damage, sentence):
    folder = small_cifar(tmp_path, monkeypatch, pixels)
    load_cifar(tmp_path, classes=10)
    damage(folder)
    monkeypatch.setattr(pickle, "load", lambda *a, **k: pytest.fail("a damaged pickle was opened"))
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as error: load_cifar(tmp_path, classes=10)
    assert "\n" not in str(error.value)


def test_two_that_want_one_archive_take_turns(tmp_path, monkeypatch, pixels):
    small_cifar(tmp_path, monkeypatch, pixels)
    unpack, unpacked = tvutils.extract_archive, []
    def slowly(*args): unpacked.append(args); time.sleep(.2); unpack(*args)
    monkeypatch.setattr(tvutils, "extract_archive", slowly)
    with ThreadPoolExecutor(2) as pool: found = list(pool.map(lambda _: load_dataset("cifar10", tmp_path), range(2)))
    assert torch.equal(found[0].train_images, found[1].train_images) and len(unpacked) == 1


def test_an_archive_with_another_sum_is_not_unpacked(tmp_path):
    (tmp_path/"cifar-100-python.tar.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="must have the published SHA-256 85cd44d0"): load_cifar(tmp_path, classes=100)
    assert [p.name for p in tmp_path.iterdir()] == ["cifar-100-python.tar.gz"]


@pytest.mark.parametrize("group,share", [(8, .01), (3, .05)])
def test_thinning_keeps_its_share_on_average(group, share):
    digits = load_dataset("digits")
    counts = [int((thinned(digits, name="x", group=group, share=share, seed=s).train_labels == group).sum()) for s in range(300)]
    n, others = (digits.train_labels == group).sum().item(), (digits.train_labels != group).sum().item()
    expected = others*share/(1 - share)
    assert np.mean(counts) == pytest.approx(expected, abs=4*math.sqrt(expected*(1 - expected/n)/300))


def test_thinned_digits_are_the_same_on_every_machine():
    data = load_unbalanced_digits()
    assert len(data.train_labels) == 1307 and int((data.train_labels == 8).sum()) == 9 # the draw of seed 0: numpy keeps this stream


def write_wall(folder, table):
    folder.mkdir(parents=True)
    draw, stems = np.random.default_rng(0), ["t0p5_x0_y1p5_z0p51_layer1", "t1_x2p25_y-1p5_z0p51_layer1"]
    for k, stem in enumerate(stems):
        np.savetxt(folder/f"{stem}.csv", melt_pools.melt_pool(bool(k), draw, shape=melt_pools.FRAME_SHAPE, wander=40.), fmt="%.0f", delimiter=",")
    (folder/"labels.csv").write_text(table.format(*stems))
    return folder


@pytest.mark.parametrize("table", ["frame,porous\n{0}.csv,no\n{1}.csv,yes\n", "x,name,label\n1,{0},Healthy\n2,{1},Porous\n", "file,pore size in mm\n{0},\n{1},0.07\n",
                                   "file,pore diameter\n{1},0.07\n{0},0\n"])
def test_thinwall_tables_in_the_forms_that_people_keep(tmp_path, table):
    content = melt_pools.read_thinwall(write_wall(tmp_path/"Thinwall", table))
    assert content["labels"].tolist() == [0, 1] and content["images"].shape == (2, 200, 200)


def test_thinwall_is_loaded_split_and_kept(tmp_path):
    write_wall(tmp_path/"Thinwall", "frame,porous\n{0},0\n{1},1\n")
    data = load_dataset("thinwall", tmp_path)
    assert len(data.train_labels) + len(data.test_labels) == 2 and data.class_names == ("nonporous", "porous") and "SYNTHETIC" not in data.source
    assert list((tmp_path/"cache").rglob("Thinwall-*.pt"))
    assert data.train_images.max()*datasets.KELVINS + melt_pools.MELTING > melt_pools.MELTING


@pytest.mark.parametrize("table,sentence", [("frame,porous\n{0},0\n", "without a row"), ("frame,porous\n{0},1\n{1},maybe\n", "porous must say of every frame porous or not, or the pore's size in mm, got 'maybe' in line 3 of"), ("frame,weather\n{0},1\n{1},0\n", "must have a column with porous or not"),
                                            ("name,porous\na,0\nb,1\n", "must have a column with the frames' names"), ("frame,porous\n{0},0\n{1},1\nt9_x0_y0_z0_layer3,1\n", "without a file")])
def test_thinwall_tables_that_cannot_be_read(tmp_path, table, sentence):
    with pytest.raises(ValueError, match=sentence) as error: melt_pools.read_thinwall(write_wall(tmp_path/"Thinwall", table))
    assert "\n" not in str(error.value)


def test_synthetic_frames_say_so_everywhere():
    for name in ("synthetic_melt_pool", "synthetic_melt_pool_small"):
        data = load_dataset(name)
        assert data.source.startswith("SYNTHETIC") and data.name == name and "SYNTHETIC" in where(name)
        assert len(data.train_labels) == 1173 and len(data.test_labels) == 391


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "thinwall"])
def test_missing_data_is_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setenv("DP_COMPANION_DATA", str(tmp_path/"none"))
    for place in ("torchvision.datasets.utils.download_url", "torchvision.datasets.mnist.download_and_extract_archive"):
        monkeypatch.setattr(place, lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(FileNotFoundError, match="must be (in|at)") as error: load_dataset(name)
    assert "\n" not in str(error.value) and where(name).startswith("not at hand")


def real(name):
    "The real data, or a skip that says what is missing."
    if not where(name).startswith("at hand"): pytest.skip(f"{name} is {where(name)}")
    return load_dataset(name)


@pytest.mark.data
def test_real_mnist_and_its_thinned_form():
    data, rare = real("mnist"), real("unbalanced_mnist")
    assert data.train_images.shape == (60000, 1, 28, 28) and data.train_images.mean().abs() < 1e-3
    assert (rare.test_labels == data.test_labels).all() and .008 < (rare.train_labels == 8).double().mean() < .012
    assert [int((data.test_labels == m).sum()) for m in (2, 8)] == [1032, 974] # what the published group accuracies are shares of


@pytest.mark.slow
@pytest.mark.data
def test_real_cifar10():
    data = real("cifar10")
    assert data.train_images.shape == (50000, 3, 32, 32) and data.test_labels.bincount().tolist() == [1000]*10
    assert data.class_names == ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


# Models

@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size,channels,classes", [(8, 1, 10), (24, 1, 2), (28, 1, 10), (32, 3, 100)])
def test_models_take_every_size_and_hold_no_state_of_their_inputs(name, size, channels, classes):
    model = build_model(name, seed=0, image_size=size, channels=channels, classes=classes)
    images = torch.randn(4, channels, size, size)
    whole, alone = model(images), torch.cat([model(image[None]) for image in images])
    assert whole.shape == (4, classes) and not list(model.buffers())
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-5) # no sample sees another


@pytest.mark.parametrize("name", SMALL)
def test_oracles_agree_on_every_model(name):
    def build(): return build_model(name, seed=0, image_size=24, channels=2, classes=3).double()
    draw, rule = torch.Generator().manual_seed(1), clip_rule("global_adapt_v2", max_grad_norm=1., strict_max_grad_norm=3.)
    images, labels = torch.randn(6, 2, 24, 24, generator=draw, dtype=torch.float64), torch.randint(3, (6,), generator=draw)
    model = build()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.), clip_rule=rule, expected_batch_size=6)
    step(cross_entropy, images, labels, noise_multiplier=0.)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    for oracle in ORACLES.values():
        total, _ = oracle(build(), torch.nn.CrossEntropyLoss(), images, labels, rule.scale)
        torch.testing.assert_close(found, total/6, rtol=1e-9, atol=1e-11)


def test_nf_net_without_timm_or_weights_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"timm must be installed for the NF-Nets.*dp-companion\[vision\]"): build_model("nf_net_f0", seed=0)


def test_nf_net_with_timm(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm", reason="timm is not installed (the extra `vision`)")
    from safetensors.torch import save_file
    monkeypatch.setenv("DP_COMPANION_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pre-trained weights must be at"): build_model("nf_net_f0", seed=0)
    reference, path = timm.create_model("dm_nfnet_f0", num_classes=3), models.weights_file("nf_net_f0")
    path.parent.mkdir(); save_file(reference.state_dict(), path)
    model = build_model("nf_net_f0", seed=0, classes=5)
    assert torch.equal(model[1].stem.conv1.weight, reference.stem.conv1.weight)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["1.head.fc.weight", "1.head.fc.bias"]


# Optimizers and learning rates

@pytest.mark.parametrize("name", LR_SCHEDULERS)
@properties
@given(st.integers(1, 300), st.floats(1e-6, 10))
def test_rates_stay_finite_positive_and_scale_with_the_initial_one(name, steps, learning_rate):
    def rates(initial):
        optimizer = build_optimizer("sgd", [torch.nn.Parameter(torch.zeros(1))], learning_rate=initial)
        scheduler, used = build_lr_scheduler(name, optimizer, learning_rate=initial, steps=steps), []
        for t in range(steps):
            used.append(optimizer.param_groups[0]["lr"]); optimizer.step(); scheduler.step(); observe(scheduler, public_loss=1.)
        return np.array(used)
    used = rates(learning_rate)
    assert np.isfinite(used).all() and (used > 0).all() and used.max() <= 25*learning_rate*(1 + 1e-9)
    np.testing.assert_allclose(used, rates(1.)*learning_rate, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_private_steps(name):
    data, model = load_dataset("digits"), build_model("unbalanced_mnist_cnn", seed=0, image_size=8)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = build_optimizer(name, model.parameters(), learning_rate=1e-3, weight_decay=1e-3)
    step = PrivateStep(model, optimizer, clip_rule=clip_rule("flat", max_grad_norm=1.), expected_batch_size=64, generator=torch.Generator().manual_seed(0))
    for k in range(3): step(cross_entropy, data.train_images[64*k:64*k + 64], data.train_labels[64*k:64*k + 64], noise_multiplier=1.)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert after.isfinite().all() and not torch.equal(before, after)


SIDES = {"digits": 8, "unbalanced_digits": 8, "two_digits": 8, "mnist": 28, "unbalanced_mnist": 28, "cifar10": 32, "cifar100": 32, "synthetic_melt_pool_small": 24, "thinwall": 200}


@pytest.mark.parametrize("profiles", [PROFILES, ADAPTIVE_PROFILES], ids=["global_adapt_v2", "adaptive_noise"])
def test_every_profile_has_kernels_for_its_network(profiles):
    assert all((profile.model, SIDES[profile.dataset]) in KERNELS for of_paper in profiles.values() for profile in of_paper.values())


@pytest.mark.parametrize("method, epochs", [("DP-SGD-Global-Adapt-V2-L", 90), ("DP-SGD-Global-Adapt-V2-T", 90), ("DP-SGD-Global-Adapt-V2-S", 90)])
def test_decays_fall_in_ten_epochs_as_in_a_hundred(method, epochs):
    def fall(name, at):
        said = method_values(profile_named(name), method)
        shape = build_method(**said, noise_multiplier=1.).noise(None)
        return shape.at(at)/shape.at(0)
    assert fall("laptop", epochs//10) == pytest.approx(fall("paper", epochs), rel=1e-12)


def test_an_epoch_without_a_step_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="expected_batch_size must leave a step to every epoch, got expected_batch_size=1000 of 1437 records; use at most 718"):
        short_run(tmp_path, monkeypatch, "cpu", expected_batch_size=1000)


def test_a_bound_that_follows_counts_takes_no_schedule(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="bound_decay_rate must be None with clip_rule=global_adapt"):
        short_run(tmp_path, monkeypatch, "cpu", "global_adapt", strict_max_grad_norm=10., bound_decay_rate=.5, drop_every=1)


def short_run(runs, monkeypatch, device, name="flat", **values):
    monkeypatch.setenv("DP_COMPANION_DEVICE", device)
    return train(run_spec(**dict(paper="global_adapt_v2", method=name, dataset="digits", model="mnist_cnn", clip_rule=name, noise_multiplier=1., accounting="as_printed",
                                     target_epsilon=1., epochs=2, expected_batch_size=128, seed=0) | values), runs)


def test_the_trainers_batches_are_independent_draws():
    "Marginals and all pairs of records, at the exact rate; every draw is of another step."
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler
    n, q, draws = 50, .2, 20_000
    member = np.zeros((draws, n))
    for row, batch in zip(member, UniformWithReplacementSampler(num_samples=n, sample_rate=q, generator=torch.Generator().manual_seed(0), steps=draws)): row[batch] = 1
    pairs = (member.T@member)[np.triu_indices(n, 1)]/draws
    following = (member[1:].T@member[:-1])/(draws - 1)
    for found, rate, most in ((member.mean(0), q, 4), (pairs, q*q, 5), (following, q*q, 5)): assert np.abs(found - rate).max() < most*np.sqrt(rate*(1 - rate)/draws)


@pytest.mark.parametrize("device", ["gpu7", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_one_sentence(tmp_path, monkeypatch, device):
    with pytest.raises(ValueError, match=f"DP_COMPANION_DEVICE must be a device that torch can use here, got {device!r}; unset it"): short_run(tmp_path, monkeypatch, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
@pytest.mark.parametrize("name", ["flat", "global_adapt", "group_adaptive"])
def test_a_run_on_cuda_takes_the_steps_of_the_cpu(tmp_path, monkeypatch, name):
    here, there = (short_run(tmp_path/device, monkeypatch, device, name) for device in ("cpu", "cuda"))
    assert there.provenance["device"] == "cuda" and here.budget == there.budget
    for a, b in zip(here.epochs, there.epochs): assert a["nonprivate_train_loss"] == pytest.approx(b["nonprivate_train_loss"], rel=1e-3)


def test_only_the_plateau_hears_the_public_loss():
    for name in LR_SCHEDULERS:
        optimizers = [build_optimizer("sgd", [torch.nn.Parameter(torch.zeros(1))], learning_rate=1.) for _ in range(2)]
        schedulers = [build_lr_scheduler(name, o, learning_rate=1., steps=50) for o in optimizers]
        for t in range(50):
            for o, s, loss in zip(optimizers, schedulers, (1/(t + 1), 1.)): o.step(); s.step(); observe(s, public_loss=loss)
        same = optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert same == (name != "plateau")


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_an_mnist_that_is_not_the_published_one_is_refused(tmp_path, damage):
    from dp_companion.training.datasets import MNIST_SHA256, load_mnist
    raw = tmp_path/"MNIST"/"raw"
    raw.mkdir(parents=True)
    for name in MNIST_SHA256: (raw/name).write_bytes({"flipped": bytes(1000), "cut": b"\0\0", "empty": b""}[damage])
    with pytest.raises(ValueError, match="MNIST must have the published SHA-256, got another file at .*train-images-idx3-ubyte"): load_mnist(tmp_path)


def test_a_flipped_bit_of_a_checkpoint_is_noticed(tmp_path):
    from dp_companion.algorithms.checkpoints import read_checkpoint
    torch.save({"weights": torch.zeros(5000)}, path := tmp_path/"checkpoint.pt")
    assert len(read_checkpoint(path)["weights"]) == 5000
    content = bytearray(path.read_bytes())
    content[len(content)//2] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["weights"].any() # torch does not see it
    with pytest.raises(ValueError, match="checkpoint must be whole"): read_checkpoint(path)


def test_a_cell_of_a_table_has_one_noise():
    from dp_companion.training.records import RunRecord
    from dp_companion.papers.tables import summarise
    def record(seed, sigma):
        spec = run_spec(paper="global_adapt_v2", method="DP-SGD", dataset="digits", model="mnist_cnn", clip_rule="flat", accounting="certified", noise_multiplier=sigma, target_epsilon=1., epochs=1, expected_batch_size=64, seed=seed)
        return RunRecord(spec=spec, epochs=[], final={"test_accuracy": .5}, budget={"claimed": None, "certified": {"pld": {"epsilon": 1/sigma}}, "empirical": None}, provenance={})
    table = summarise([record(0, 2.), record(1, 2.), record(0, 1.)])
    assert table[["noise_multiplier", "certified_pld", "seeds"]].values.tolist() == [[2., .5, 2], [1., 1., 1]]


def test_reference_records_are_found_from_a_folder_below(monkeypatch):
    from dp_companion.papers.results import reference_of
    here = Path(__file__).parents[1]
    monkeypatch.chdir(here/"nbs"/"papers"/"sad"/"experiments") # As Jupyter does
    below = reference_of("sad")
    monkeypatch.chdir(here)
    assert below and below == reference_of("sad") and reference_of("sad", folder=Path("no/such/folder")) == []


def test_the_sampler_of_24_bits_stays_within_the_target():
    "Opacus's sampler compares q with draws on a grid of 2^-24, so a record's probability is q rounded up."
    from dataclasses import replace
    from dp_companion.budgets.certified import certify
    from dp_companion.budgets.events import MechanismEvent
    from dp_companion.papers.results import reference_of
    grid, found = 2**24, {}
    for r in reference_of("global_adapt_v2"):
        if r.spec.accounting == "certified" and r.spec.dataset == "mnist" and r.spec.method.name in ("DP-SGD", "DP-SGD-Global-Adapt-V2-S"): found[r.spec.method.name, r.spec.target_epsilon] = r
    assert len(found) == 6
    for (_, target), r in found.items():
        events = [MechanismEvent(**e) for e in r.budget["events"]]
        assert all(math.ceil(e.sample_rate*grid)/grid > e.sample_rate for e in events)
        spent = certify([replace(e, sample_rate=math.ceil(e.sample_rate*grid)/grid) for e in events], delta=r.spec.delta, accountants=("pld",))["pld"].epsilon
        assert r.budget["certified"]["pld"]["epsilon"] < spent <= target
