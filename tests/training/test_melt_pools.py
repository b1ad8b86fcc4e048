"Melt pools: Thinwall in the forms that people keep, and synthetic frames."
import numpy as np
import pytest
from dp_companion.training import datasets, melt_pools
from dp_companion.training.datasets import load_dataset, where


def write_wall(folder, table):
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    stems = ["t0p5_x0_y1p5_z0p51_layer1", "t1_x2p25_y-1p5_z0p51_layer1"]
    for k, stem in enumerate(stems):
        np.savetxt(
            folder/f"{stem}.csv",
            melt_pools._melt_pool(bool(k), draw, shape=melt_pools._FRAME_SHAPE, wander=40.),
            fmt="%.0f", delimiter=","
        )
    (folder/"labels.csv").write_text(table.format(*stems))
    return folder


@pytest.mark.parametrize(
    "table",
    [
        "frame,porous\n{0}.csv,no\n{1}.csv,yes\n", "x,name,label\n1,{0},Healthy\n2,{1},Porous\n",
        "file,pore size in mm\n{0},\n{1},0.07\n", "file,pore diameter\n{1},0.07\n{0},0\n"
    ]
)
def test_thinwall_tables_in_the_forms_that_people_keep(tmp_path, table):
    content = melt_pools.read_thinwall(write_wall(tmp_path/"Thinwall", table))
    assert content["labels"].tolist() == [0, 1]
    assert content["images"].shape == (2, 200, 200)


def test_thinwall_is_loaded_split_and_kept(tmp_path):
    write_wall(tmp_path/"Thinwall", "frame,porous\n{0},0\n{1},1\n")
    data = load_dataset("thinwall", tmp_path)
    assert len(data.train_labels) + len(data.test_labels) == 2
    assert data.class_names == ("nonporous", "porous")
    assert "SYNTHETIC" not in data.source
    assert list((tmp_path/"cache").rglob("Thinwall-*.pt"))
    assert data.train_images.max()*datasets._KELVINS + melt_pools.MELTING > melt_pools.MELTING


@pytest.mark.parametrize(
    "table,sentence",
    [
        ("frame,porous\n{0},0\n", "without a row"),
        (
            "frame,porous\n{0},1\n{1},maybe\n",
            "porous must say of every frame porous or not, or the pore's size in mm, got 'maybe' "
            "in line 3 of"
        ),
        ("frame,weather\n{0},1\n{1},0\n", "must have a column with porous or not"),
        ("name,porous\na,0\nb,1\n", "must have a column with the frames' names"),
        ("frame,porous\n{0},0\n{1},1\nt9_x0_y0_z0_layer3,1\n", "without a file")
    ]
)
def test_thinwall_tables_that_cannot_be_read(tmp_path, table, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        melt_pools.read_thinwall(write_wall(tmp_path/"Thinwall", table))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_synthetic_frames_say_so_everywhere():
    for name in ("synthetic_melt_pool", "synthetic_melt_pool_small"):
        data = load_dataset(name)
        assert data.source.startswith("SYNTHETIC")
        assert data.name == name
        assert "SYNTHETIC" in where(name)
        assert len(data.train_labels) == 1173
        assert len(data.test_labels) == 391
