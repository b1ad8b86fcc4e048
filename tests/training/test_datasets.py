"Data sets: real ones, thinned ones, and files that are not the published ones."
import hashlib
import io
import math
import os
import pickle
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10
from torchvision.datasets import utils as tvutils
from dp_companion.training import datasets
from dp_companion.training.datasets import (
    _load_cifar, load_dataset, _load_unbalanced, _thinned, where
)


def write_images(folder, pixels, suffix="png", classes=("cat", "dog")):
    for k, place in enumerate(f"{part}/{c}" for part in ("train", "test") for c in classes):
        (folder/place).mkdir(parents=True)
        Image.fromarray(pixels[k]).save(folder/place/f"0.{suffix}")
    return folder


@pytest.fixture
def pixels(): return np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)


def test_only_a_reencoded_cifar_says_so(tmp_path, pixels):
    write_images(tmp_path/"cifar10", pixels, "jpg")
    write_images(tmp_path/"cifar100", pixels, "png")
    assert "re-encoded as JPEG" in _load_cifar(tmp_path, classes=10).source
    assert "re-encoded" not in _load_cifar(tmp_path, classes=100).source


def small_cifar(tmp_path, monkeypatch, pixels):
    "An archive of torchvision's layout with one training batch, and torchvision told of its sums."
    def batch(images):
        return pickle.dumps(
            {
                "data": images.transpose(0, 3, 1, 2).reshape(len(images), -1),
                "labels": list(range(len(images)))
            },
            protocol=2
        )
    files = {
        "data_batch_1": batch(pixels[:3]), "test_batch": batch(pixels[3:]),
        "batches.meta": pickle.dumps({"label_names": list("abcdefghij")}, protocol=2)
    }
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    archive = tmp_path/CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    monkeypatch.setitem(
        datasets._ARCHIVE_SHA256, CIFAR10.filename, hashlib.sha256(archive.read_bytes()).hexdigest()
    )
    return tmp_path/CIFAR10.base_folder


def test_original_batches_are_read_through_torchvision(tmp_path, monkeypatch, pixels):
    folder = small_cifar(tmp_path, monkeypatch, pixels)
    data = _load_cifar(tmp_path, classes=10)
    assert folder.is_dir()
    assert data.train_images.shape == (3, 3, 32, 32)
    assert data.train_labels.tolist() == [0, 1, 2]
    assert data.class_names == tuple("abcdefghij")
    scale = (
        data.test_images[0]*torch.tensor(datasets.RGB_STD)[:, None, None]
        + torch.tensor(datasets.RGB_MEAN)[:, None, None]
    )*255
    np.testing.assert_allclose(scale.permute(1, 2, 0), pixels[3], atol=1e-3)


@pytest.mark.parametrize(
    "damage,sentence",
    [
        (
            lambda f: (f/"data_batch_1").write_bytes(pickle.dumps({"data": 1}, protocol=2)),
            "got one with another MD5"
        ),
        (
            lambda f: (f/"data_batch_1").write_bytes(
                pickle.dumps(partial(os.system, "exit 1"), protocol=2)
            ),
            "got one with another MD5"
        ),
        (
            lambda f: (f/"test_batch").write_bytes((f/"test_batch").read_bytes()[:50]),
            "got one with another MD5"
        ),
        (lambda f: (f/"batches.meta").unlink(), "must hold batches.meta")
    ]
)
def test_damaged_batches_are_not_unpickled(tmp_path, monkeypatch, pixels, damage, sentence):
    folder = small_cifar(tmp_path, monkeypatch, pixels)
    _load_cifar(tmp_path, classes=10)
    damage(folder)
    monkeypatch.setattr(pickle, "load", lambda *a, **k: pytest.fail("a damaged pickle was opened"))
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as error:
        _load_cifar(tmp_path, classes=10)
    assert "\n" not in str(error.value)


def test_two_that_want_one_archive_take_turns(tmp_path, monkeypatch, pixels):
    small_cifar(tmp_path, monkeypatch, pixels)
    unpack, unpacked = tvutils.extract_archive, []
    def slowly(*args):
        unpacked.append(args)
        time.sleep(.2)
        unpack(*args)
    monkeypatch.setattr(tvutils, "extract_archive", slowly)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: load_dataset("cifar10", tmp_path), range(2)))
    assert torch.equal(found[0].train_images, found[1].train_images)
    assert len(unpacked) == 1


def test_an_archive_with_another_sum_is_not_unpacked(tmp_path):
    (tmp_path/"cifar-100-python.tar.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="must have the published SHA-256 85cd44d0"):
        _load_cifar(tmp_path, classes=100)
    assert [p.name for p in tmp_path.iterdir()] == ["cifar-100-python.tar.gz"]


@pytest.mark.parametrize("group,share", [(8, .01), (3, .05)])
def test_thinning_keeps_its_share_on_average(group, share):
    digits = load_dataset("digits")
    counts = [
        int(
            (
                _thinned(digits, name="x", group=group, share=share, seed=s).train_labels == group
            ).sum()
        )
        for s in range(300)
    ]
    n = (digits.train_labels == group).sum().item()
    others = (digits.train_labels != group).sum().item()
    expected = others*share/(1 - share)
    assert np.mean(counts) == pytest.approx(
        expected, abs=4*math.sqrt(expected*(1 - expected/n)/300)
    )


def test_thinned_digits_are_the_same_on_every_machine():
    data = _load_unbalanced()
    # the draw of seed 0: numpy keeps this stream
    assert len(data.train_labels) == 1307
    assert int((data.train_labels == 8).sum()) == 9


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "thinwall"])
def test_missing_data_is_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setenv("DP_COMPANION_DATA", str(tmp_path/"none"))
    for place in (
        "torchvision.datasets.utils.download_url",
        "torchvision.datasets.mnist.download_and_extract_archive"
    ):
        monkeypatch.setattr(place, lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(FileNotFoundError, match="must be (in|at)") as error:
        load_dataset(name)
    assert "\n" not in str(error.value)
    assert where(name).startswith("not at hand")


def real(name):
    "The real data, or a skip that says what is missing."
    if not where(name).startswith("at hand"):
        pytest.skip(f"{name} is {where(name)}")
    return load_dataset(name)


@pytest.mark.slow
@pytest.mark.data
def test_real_mnist_and_its_thinned_form():
    data, rare = real("mnist"), real("unbalanced_mnist")
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.train_images.mean().abs() < 1e-3
    assert (rare.test_labels == data.test_labels).all()
    assert .008 < (rare.train_labels == 8).double().mean() < .012
    # what the published group accuracies are shares of
    assert [int((data.test_labels == m).sum()) for m in (2, 8)] == [1032, 974]


@pytest.mark.slow
@pytest.mark.data
def test_real_cifar10():
    data = real("cifar10")
    assert data.train_images.shape == (50000, 3, 32, 32)
    assert data.test_labels.bincount().tolist() == [1000]*10
    assert data.class_names == (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
    )


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_an_mnist_that_is_not_the_published_one_is_refused(tmp_path, damage):
    from dp_companion.training.datasets import _MNIST_SHA256, _load_mnist
    raw = tmp_path/"MNIST"/"raw"
    raw.mkdir(parents=True)
    for name in _MNIST_SHA256:
        (raw/name).write_bytes({"flipped": bytes(1000), "cut": b"\0\0", "empty": b""}[damage])
    with pytest.raises(
        ValueError,
        match="MNIST must have the published SHA-256, got another file at .*train-images-idx3-ubyte"
    ):
        _load_mnist(tmp_path)
