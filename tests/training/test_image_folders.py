"Image folders: the cache follows the folder, and is whole or absent."
import os
import numpy as np
import pytest
import torch
from PIL import Image
from dp_companion.training import image_folders
from dp_companion.training.datasets import load_dataset, _load_image_folder, where


def write_images(folder, pixels, suffix="png", classes=("cat", "dog")):
    for k, place in enumerate(f"{part}/{c}" for part in ("train", "test") for c in classes):
        (folder/place).mkdir(parents=True)
        Image.fromarray(pixels[k]).save(folder/place/f"0.{suffix}")
    return folder


@pytest.fixture
def pixels(): return np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)


def test_an_image_folder_is_decoded_again_after_a_change(tmp_path, pixels, monkeypatch):
    folder, read = write_images(tmp_path/"pets", pixels), []
    monkeypatch.setattr(
        image_folders, "_pixels",
        lambda path, real=image_folders._pixels: read.append(path) or real(path)
    )
    first = _load_image_folder(folder, name="pets", source="made here")
    _load_image_folder(folder, name="pets", source="made here")
    assert len(read) == 4
    Image.fromarray(pixels[3]).save(folder/"train"/"cat"/"1.png")
    assert len(_load_image_folder(folder, name="pets", source="made here").train_labels) == 3
    assert len(read) == 9
    assert len(first.train_labels) == 2


def test_two_folders_with_one_listing_do_not_share_a_cache(tmp_path, pixels):
    a = write_images(tmp_path/"a"/"pets", pixels, "png")
    b = write_images(tmp_path/"b"/"pets", pixels[::-1], "png")
    for p in [*a.rglob("*.png"), *b.rglob("*.png")]:
        os.utime(p, ns=(1, 1))
    assert not torch.equal(
        *(_load_image_folder(f, name="pets", source="").train_images for f in (a, b))
    )


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, pixels, monkeypatch):
    (tmp_path/"file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path/"file"))
    write_images(tmp_path/"cifar10", pixels)
    assert len(load_dataset("cifar10", tmp_path).train_labels) == 2


def test_a_killed_writer_leaves_no_half_cache(tmp_path, pixels, monkeypatch):
    folder = write_images(tmp_path/"pets", pixels)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _load_image_folder(folder, name="pets", source="")
    assert not list((tmp_path/"cache").rglob("*.*"))


def real(name):
    "The real data, or a skip that says what is missing."
    if not where(name).startswith("at hand"):
        pytest.skip(f"{name} is {where(name)}")
    return load_dataset(name)
