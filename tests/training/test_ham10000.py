"HAM10000 in its published layout, on small files: reading, faults, the split, the leak, the cache."
import csv
import json
import os
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from PIL import Image
from dp_companion.training.datasets import data_root, load_dataset, _load_ham10000, where
from dp_companion.papers.sad.grid import sad_profile, sad_values
from dp_companion.training.ham10000 import (
    CLASSES, _COLUMNS, PUBLISHED_COUNTS, ham10000_reader, held_out,
    _read_metadata, split_ham10000
)
from dp_companion.training.image_folders import cache_root, decoded
from dp_companion.training.run import Run
from dp_companion.training.spec import run_spec

DX = list(CLASSES)


def write(
    folder, *, images_in=("HAM10000_images",), table="HAM10000_metadata.csv", suffix=".jpg",
    size=(40, 30), lesions=10, classes=DX, mode="RGB"
):
    "Lesions of one to three images per class, shuffled; the red of an image says its row."
    rows = [
        (f"HAM_{k}{j:02d}", dx) for k, dx in enumerate(classes) for j in range(lesions)
        for _ in range(1 + j % 3)
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    for name in images_in:
        (folder/name).mkdir(parents=True)
    lines = []
    for n, r in enumerate(order):
        Image.new("RGB", size, (n, 128, 255 - n)).convert(mode).save(
            folder/images_in[n % len(images_in)]/f"ISIC_{n:07d}{suffix}", format="JPEG", quality=95
        )
        lines.append([rows[r][0], f"ISIC_{n:07d}", rows[r][1], "histo", "50.0", "male", "back"])
    with (folder/table).open("w", newline="") as file:
        csv.writer(file).writerows([_COLUMNS, *lines])
    return folder


def rewrite(folder, change):
    path = folder/"HAM10000_metadata.csv"
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    change(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.mark.parametrize(
    "layout",
    [
        {}, {"images_in": ("HAM10000_images_part_1", "HAM10000_images_part_2")},
        {"table": "HAM10000_metadata"}, {"suffix": ".JPG"}, {"size": (30, 40)}, {"size": (600, 450)}
    ]
)
@pytest.mark.parametrize("side", [8, 16, 30])
def test_every_image_meets_its_row(tmp_path, layout, side):
    content = ham10000_reader(side)(write(tmp_path/"HAM10000", lesions=5, **layout))
    assert content["images"].shape == (len(content["labels"]), side, side, 3)
    assert content["images"].dtype == torch.uint8
    first = content["images"][..., 0].float()
    assert (first.amax((1, 2)) - first.amin((1, 2))).max() <= 2 # one colour, no border
    assert (first.mean((1, 2)) - torch.arange(len(first))).abs().max() < 4
    with next((tmp_path/"HAM10000").glob("HAM10000_metadata*")).open() as file:
        rows = list(csv.DictReader(file))
    assert content["labels"].tolist() == [DX.index(row["dx"]) for row in rows]
    names = sorted({row["lesion_id"] for row in rows})
    assert content["units"].tolist() == [names.index(row["lesion_id"]) for row in rows]


def test_middle_square_against_block_means(tmp_path):
    "For a whole multiple of the side, a scaled smooth image is near its block means."
    x, y = np.meshgrid(np.linspace(0, 1, 600), np.linspace(0, 1, 450))
    smooth = np.stack([255*x, 255*y, 127 + 127*np.sin(6*x + 4*y)], -1).astype(np.uint8)
    folder = write(tmp_path/"HAM10000", lesions=5)
    for name, pixels in (("ISIC_0000000", smooth), ("ISIC_0000001", smooth.transpose(1, 0, 2))):
        Image.fromarray(pixels).save(folder/"HAM10000_images"/f"{name}.jpg", quality=98)
    content = ham10000_reader(50)(folder)
    blocks = smooth[:, 75:525].reshape(50, 9, 50, 9, 3).mean((1, 3))
    for image, want in zip(content["images"].numpy(), (blocks, blocks.transpose(1, 0, 2))):
        assert np.abs(image - want)[1:-1, 1:-1].max() < 4
    assert content["sizes"] == [[40, 30], [450, 600], [600, 450]]


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_colour_spaces_become_rgb(tmp_path, mode):
    assert ham10000_reader(8)(
        write(tmp_path/"HAM10000", lesions=5, mode=mode)
    )["images"].shape[1:] == (8, 8, 3)


def test_table_may_hold_quotes_commas_and_empty_ages(tmp_path):
    folder = write(tmp_path/"HAM10000", lesions=5)
    rewrite(
        folder,
        lambda rows: [
            row.__setitem__(slice(4, 7), ["", "unknown", 'back, "upper"']) for row in rows[1:9]
        ]
    )
    assert len(_read_metadata(folder)["labels"]) == len(ham10000_reader(8)(folder)["labels"])


FAULTS = {
    "must hold the table HAM10000_metadata.csv": lambda f: (f/"HAM10000_metadata.csv").unlink(),
    "must be a table in CSV": lambda f: (
        f/"HAM10000_metadata.csv"
    ).write_bytes(b"\xff\xfe\x00\x9f"*50),
    "without dx, age": lambda f: rewrite(
        f,
        lambda rows: [row.__delitem__(slice(2, 3)) or row.__delitem__(slice(3, 4)) for row in rows]
    ),
    "without a row": lambda f: rewrite(f, lambda rows: rows.__delitem__(slice(1, None))),
    "got ISIC_0000003 twice": lambda f: rewrite(
        f, lambda rows: rows[8].__setitem__(1, "ISIC_0000003")
    ),
    "got dx='scc' for ISIC_0000004": lambda f: rewrite(
        f, lambda rows: rows[5].__setitem__(2, "scc")
    ),
    "got dx='NV' for ISIC_0000004": lambda f: rewrite(f, lambda rows: rows[5].__setitem__(2, "NV")),
    "got row 4 of": lambda f: rewrite(f, lambda rows: rows[3].__setitem__(0, "")),
    "must have one class, got several dx for": lambda f: rewrite(
        f, lambda rows: rows[1].__setitem__(0, next(r[0] for r in rows[2:] if r[2] != rows[1][2]))
    ),
    "must hold the folder HAM10000_images, or HAM10000_images_part_1": lambda f: (
        f/"HAM10000_images"
    ).rename(f/"images"),
    "got 2 without one, the first ISIC_0000001.jpg": lambda f: [
        (f/"HAM10000_images"/f"ISIC_000000{n}.jpg").unlink() for n in (1, 2)
    ],
    "every image must have a row, got 1 without one": lambda f: rewrite(f, lambda rows: rows.pop()),
    "got 2 files named ISIC_0000000": lambda f: (
        (f/"HAM10000_images_part_2").mkdir(),
        shutil.copy(f/"HAM10000_images"/"ISIC_0000000.jpg", f/"HAM10000_images_part_2")
    ),
    "ISIC_0000005.jpg (UnidentifiedImageError)": lambda f: (
        f/"HAM10000_images"/"ISIC_0000005.jpg"
    ).write_text("<html>not found</html>"),
    "ISIC_0000006.jpg (OSError)": lambda f: (
        p := f/"HAM10000_images"/"ISIC_0000006.jpg"
    ).write_bytes(p.read_bytes()[:-80]),
    "ISIC_0000007.jpg (UnidentifiedImageError)": lambda f: (
        f/"HAM10000_images"/"ISIC_0000007.jpg"
    ).write_bytes(b"")
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_faults_are_one_sentence_and_leave_no_cache(tmp_path, sentence):
    folder = write(tmp_path/"HAM10000", lesions=5, size=(200, 150))
    FAULTS[sentence](folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        decoded(folder, ham10000_reader(8))
    said = str(error.value)
    assert sentence in said
    assert "\n" not in said
    assert "; " in said
    assert str(folder) in said
    assert (
        error.value.__cause__ is None and error.value.__suppress_context__
        or error.value.__context__ is None
    )
    assert not cache_root().exists() or not list(cache_root().iterdir())


def test_a_missing_folder_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("DP_COMPANION_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="HAM10000 must be at .*10.7910/DVN/DBW86T"):
        load_dataset("ham10000")
    assert all(
        "not at hand: put its folder of images" in where(name)
        for name in ("ham10000", "ham10000_by_image", "ham10000_small")
    )
    (tmp_path/"HAM10000").mkdir()
    assert where("ham10000") == f"at hand in {tmp_path/'HAM10000'}"


@pytest.mark.parametrize("side", [0, 7, 8.0, True, None])
def test_side(side):
    with pytest.raises(ValueError, match="side must be a whole number >= 8"):
        ham10000_reader(side)


def test_cache_follows_names_sizes_and_times(tmp_path):
    folder = write(tmp_path/"HAM10000", lesions=5)
    before = decoded(folder, ham10000_reader(8))
    assert len(list(cache_root().iterdir())) == 1
    decoded(folder, ham10000_reader(10))
    assert len(list(cache_root().iterdir())) == 2
    for path in cache_root().iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    assert torch.equal(decoded(folder, ham10000_reader(8))["images"], before["images"])
    Image.new("RGB", (40, 30), (0, 255, 0)).save(folder/"HAM10000_images"/"ISIC_0000000.jpg")
    assert decoded(folder, ham10000_reader(8))["images"][0, ..., 1].min() > 250
    other = next(dx for dx in DX if dx != DX[before["labels"][0]])
    lesion = _read_metadata(folder)["units"][0]
    rewrite(
        folder,
        lambda rows: [
            row.__setitem__(2, other)
            for row, unit in zip(rows[1:], _read_metadata(folder)["units"]) if unit == lesion
        ]
    )
    assert DX[decoded(folder, ham10000_reader(8))["labels"][0]] == other


def test_nothing_is_written_beside_the_data(tmp_path):
    folder = write(tmp_path/"data"/"HAM10000", lesions=5)
    listing = lambda: sorted(
        (p, p.stat().st_mtime_ns) for p in [folder.parent, *folder.parent.rglob("*")]
    )
    before = listing()
    _load_ham10000(folder.parent, side=8)
    assert listing() == before


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path/"file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path/"file"))
    assert len(
        _load_ham10000(write(tmp_path/"data"/"HAM10000", lesions=5).parent, side=8).train_labels
    )


@pytest.mark.parametrize("seed", range(5))
def test_split_by_lesion(seed):
    draw = np.random.default_rng(seed)
    of_lesion = draw.choice(7, 400, p=[.1, .1, .1, .1, .4, .1, .1])
    units = np.repeat(np.arange(400), draw.integers(1, 7, 400))
    labels = of_lesion[units]
    test = held_out(labels, units)
    assert not set(units[test]) & set(units[~test])
    assert len(set(units[test])) == 80
    for k in range(7):
        assert abs(len(set(units[test & (labels == k)])) - (of_lesion == k).sum()/5) < 1
    order = draw.permutation(len(units))
    assert np.array_equal(held_out(labels[order], units[order]), test[order])
    by_image = held_out(labels, units, by="image")
    assert by_image.sum() == np.ceil(len(units)/5)
    for k in range(7):
        assert abs((by_image & (labels == k)).sum() - (labels == k).sum()/5) < 1


def test_too_few_lesions_is_a_sentence(tmp_path):
    folder = write(tmp_path/"HAM10000", lesions=4, classes=["nv", "vasc"])
    with pytest.raises(
        ValueError,
        match="every class must have 5 lesions or more, so that a fifth can be held out, got 4 of "
              "nv"
    ):
        _load_ham10000(tmp_path, side=8)
    assert len(split_ham10000(decoded(folder, ham10000_reader(8)), by="image")["test_labels"]) == 3


def test_dataset_carries_the_lesions(tmp_path):
    write(tmp_path/"HAM10000", lesions=5, classes=["akiec", "nv", "mel"])
    data = _load_ham10000(tmp_path, side=8)
    assert len(data.train_units) == len(data.train_labels) == len(data.train_images)
    assert data.classes == 7
    assert data.class_names[4] == "melanocytic nevi"
    assert set(data.train_labels.tolist()) == {0, 4, 5}
    of = defaultdict(set)
    for unit, label in zip(data.train_units.tolist(), data.train_labels.tolist()):
        of[unit].add(label)
    assert all(len(labels) == 1 for labels in of.values())
    assert len(of) == 12
    with pytest.raises(ValueError, match="train_units must be one per training image, got"):
        replace(data, train_labels=data.train_labels[:-1])
    assert load_dataset("digits").train_units is None


@pytest.mark.parametrize("most", [1, 2])
def test_few_images_of_a_lesion(tmp_path, most):
    write(tmp_path/"HAM10000", lesions=5, classes=["akiec", "nv", "mel"])
    every, few = _load_ham10000(tmp_path, side=8), _load_ham10000(tmp_path, side=8, most=most)
    times = Counter(every.train_units.tolist())
    assert max(times.values()) > 1
    assert Counter(few.train_units.tolist()) == {unit: min(n, most) for unit, n in times.items()}
    assert torch.equal(few.test_labels, every.test_labels)
    assert "at most" in few.source
    assert "at most" not in every.source
    first = {unit: every.train_images[every.train_units == unit][:most] for unit in times}
    # the lesion alone decides which
    assert all(
        torch.equal(few.train_images[few.train_units == unit], images)
        for unit, images in first.items()
    )


def test_unit_of_a_run(tmp_path):
    sizes = [sad_profile("laptop", name) for name in ("HAM10000", "HAM10000, lesions")]
    for size, unit in zip(sizes, ("image", "lesion")):
        spec = run_spec(
            **sad_values(size, "DP-SGD"), accounting="certified", target_epsilon=3.,
            noise_multiplier=1., seed=0
        )
        run = SimpleNamespace(spec=spec, plan=spec.plan(size.dataset_size), data=SimpleNamespace(
            classes=7), training=SimpleNamespace(following=None))
        report = Run.report(run, certify=lambda *_, **__: {})
        assert report.privacy_unit == unit
        assert report.events[0].sample_rate == pytest.approx(
            size.expected_batch_size/size.dataset_size)


@pytest.mark.data
@pytest.mark.skipif(
    not (data_root()/"HAM10000").is_dir(), reason="HAM10000 is not in DP_COMPANION_DATA"
)
def test_real_table():
    with (data_root()/"HAM10000"/"HAM10000_metadata.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["dx"] for row in rows) == PUBLISHED_COUNTS
    table = _read_metadata(data_root()/"HAM10000")
    for by in ("lesion", "image"):
        test = held_out(table["labels"], table["units"], by=by)
        trained = {row["lesion_id"] for row, out in zip(rows, test) if not out}
        leaks = sum(row["lesion_id"] in trained for row, out in zip(rows, test) if out)
        assert (leaks == 0) == (by == "lesion")
        print(f"by {by}: {leaks} of {test.sum()} test images")


def test_committed_page_is_of_the_real_table(root):
    "Without the table the page shows a made one and says so; readers need the real one."
    cells = json.loads(
        (root/"nbs"/"training"/"ham10000.ipynb").read_text(encoding="utf-8")
    )["cells"]
    shown = json.dumps([cell.get("outputs", []) for cell in cells])
    assert "HAM10000, by image" in shown
    assert "SYNTHETIC table" not in shown


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.skipif("not config.getoption('-m')", reason="a minute; run with -m data")
@pytest.mark.skipif(
    not (data_root()/"HAM10000").is_dir(), reason="HAM10000 is not in DP_COMPANION_DATA"
)
def test_real_images_in_time():
    "60 s to decode and 3 s from the cache, as processor seconds of two cores and of one."
    def seconds():
        start, data = os.times(), load_dataset("ham10000")
        assert len(data.train_labels) == 8008
        assert data.test_images.shape == (2007, 3, 64, 64)
        return sum(os.times()[:2]) - sum(start[:2])
    first, second = seconds(), seconds()
    print(f"processor seconds: {first:.1f} to decode, {second:.1f} from the cache")
    assert first < 120
    assert second < 3
    assert Path(os.environ["XDG_CACHE_HOME"]).exists()
