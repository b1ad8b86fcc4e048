"The published numbers: rows read by eye, and errors for every kind of damage."
import math
import shutil
from importlib.resources import files

import pandas as pd
import pytest

from dp_companion import published
from dp_companion.published import (_COLUMNS, PAPERS, _check_columns, _check_numbers, load,
                                    load_text, printed_decimals)

V2 = "DP-SGD-Global-Adapt-V2"
# paper, item, dataset, model, method, setting, epsilon, delta, metric, value as printed, unit
BY_EYE = [
    ("global_adapt_v2", "Table 4", "MNIST", "CNN 20-50", V2 + "-S", "",
     "1", "1e-5", "accuracy", "98.98", "percent"),
    ("global_adapt_v2", "Table 5", "CIFAR-10", "NF-Net-F0", "DP-SGD-Global-Adapt", "",
     "8", "1e-5", "accuracy", "95.03", "percent"),
    ("global_adapt_v2", "Table 6", "CIFAR-100", "NF-Net-F1", "Auto-S", "",
     "10", "1e-5", "accuracy", "79.88", "percent"),
    ("global_adapt_v2", "Table 7", "Thinwall", "small ShuffleNet", "DP-SGD", "",
     "1", "1e-3", "accuracy_group_porous", "4.5454", "percent"),
    ("global_adapt_v2", "Table 8", "Unbalanced MNIST", "CNN 16-32", "DP-F", "",
     "10", "1e-5", "privacy_cost_gap", "2.1529", "percent"),
    ("global_adapt_v2", "Table 9", "Thinwall", "small ShuffleNet", "DP-SGD-Global", "",
     "5", "1e-3", "accuracy", "95.3900", "percent"),
    ("global_adapt_v2", "Table 10", "Unbalanced MNIST", "CNN 16-32", "DP-SGD-Global-Adapt", "",
     "1", "1e-5", "privacy_cost_gap", "94.3734", "percent"),
    ("global_adapt_v2", "Table 11", "Unbalanced MNIST", "CNN 16-32", V2 + "-S", "",
     "8", "1e-5", "auc", "1.0000", "dimensionless"),
    ("global_adapt_v2", "Table 12", "Unbalanced MNIST", "CNN 16-32", "Non-DP", "",
     "", "", "accuracy_group_2", "99.8986", "percent"),
    ("global_adapt_v2", "Table 15", "CIFAR-100", "NF-Net-F1", V2 + "-T", "decay=time",
     "10", "1e-5", "accuracy", "79.89", "percent"),
    ("global_adapt_v2", "Table 16", "MNIST", "CNN 20-50", V2 + "-S", "drop_every=50",
     "", "1e-5", "noise_multiplier", "0.0046", "dimensionless"),
    ("global_adapt_v2", "Table 17", "MNIST", "CNN 20-50", V2 + "-S", "decay_rate=0.1",
     "", "1e-5", "noise_multiplier", "199.7241", "dimensionless"),
    ("global_adapt_v2", "Table 21", "MNIST", "CNN 20-50", V2 + "-S", "lr_scheduler=CosWR",
     "1", "1e-5", "loss", "0.0926", "dimensionless"),
    ("sad", "Table I", "HAM10000", "", "SAD-DPSGD", "stages=3",
     "3.0", "1e-3", "accuracy", "80.63", "percent"),
    ("sad", "Table II", "HAM10000", "", "Auto-DPSGD-L", "",
     "16", "1e-3", "accuracy", "80.23", "percent"),
    ("adaptive_noise", "Results table", "CIFAR-10", "", "DP-SGD", "",
     "0.5", "", "accuracy", "78.7", "percent"),
    ("sanitization", "Table 1", "", "", "Sanitization", "clipping_threshold=5.0;component=3",
     "", "", "noisy_output", "0.07", "dimensionless"),
    ("sanitization", "Table 3", "CIFAR-10", "CNN", "Sanitization + Adaptive C + Stopping", "",
     "0.88", "1e-5", "accuracy", "60.33", "percent"),
    ("sanitization", "Table 4", "CIFAR-10", "SmoothNets", "Remerscheid et al.", "",
     "7", "", "accuracy", "73.5", "percent"),
    ("sad", "Section II-B", "HAM10000", "", "Ziller et al.", "",
     "8", "", "matthews", "37.48", "percent"),
    ("sanitization", "Section 6.2", "MNIST", "", "Zhang et al.", "",
     "1.19", "1e-5", "accuracy", "97.7", "percent"),
]


@pytest.fixture(scope="module")
def text(): return load_text()


@pytest.mark.parametrize("row", BY_EYE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_row_read_by_eye(text, row):
    assert sum(tuple(line) == row for line in text[list(_COLUMNS)].itertuples(index=False)) == 1


def test_floats_are_nan_only_where_the_paper_is_silent(text):
    frame = load()
    for name in ("epsilon", "delta", "value"):
        assert frame[name].dtype == float
        assert (frame[name].isna() == (text[name] == "")).all()
    assert frame.value.notna().all()
    assert ([math.isclose(a, float(b)) for a, b in zip(frame.value, text.value, strict=True)]
            == [True]*len(frame))


def test_the_four_papers_make_the_whole():
    parts = pd.concat([load(paper) for paper in PAPERS], ignore_index=True)
    pd.testing.assert_frame_equal(parts, load())
    assert len(parts) == 562


def test_each_block_of_a_table_is_complete(text):
    "A method that stands in a table stands there once for each budget, data set and metric."
    tables = text[text.paper == "global_adapt_v2"]
    for table in ("Table 4", "Table 7", "Table 11", "Table 14"):
        rows = tables[tables["item"] == table]
        assert sorted(set(rows.epsilon), key=float) == ["1", "3", "5", "8", "10"]
        assert rows.groupby("epsilon").size().nunique() == 1
        assert rows.groupby(["dataset", "method"]).size().nunique() == 1


def test_settings_are_key_value_pairs(text):
    for setting in set(text.setting) - {""}:
        assert all(len(pair.split("=")) == 2 and all(pair.split("="))
                   for pair in setting.split(";")), setting


def test_the_headline_gains_follow_from_the_tables():
    rows = load("global_adapt_v2").query("epsilon == 1 and metric == 'accuracy'")
    for table, gain in (("Table 5", .6786), ("Table 6", 4.0130)):
        accuracy = rows[rows["item"] == table].set_index("method").value
        assert round(100*(accuracy[V2 + "-S"]/accuracy.drop(V2 + "-S").max() - 1), 4) == gain
    sad = load("sad").query("epsilon == 3 and item == 'Table II'").set_index("method").value
    assert round(sad["SAD-DPSGD"] - sad["DP-SGD"], 2) == 2.15


DAMAGE = {
     "a column is unknown": (lambda t: t.assign(note=""),
                             r"column must be one of .*, got column=note"),
     "a column is missing": (lambda t: t.drop(columns="delta"), r"columns must include delta"),
     "a value is a word": (lambda t: t.assign(value=t.value.where(t.index != 7, "N/A")),
                           r"value must be a plain number, got "
                           r"value=N/A in global_adapt_v2, Table 4"),
     "a value is infinite": (lambda t: t.assign(value=t.value.where(t.index != 7, "inf")),
                             r"value must be a plain number, got value=inf"),
     "a value keeps its percent sign": (
         lambda t: t.assign(value=t.value.where(t.index != 7, "98.77%")),
         r"value must be a plain number, got value=98.77%"),
     "a value is empty": (lambda t: t.assign(value=t.value.where(t.index != 7, "")),
                          r"value must be a plain number"),
     "a delta is a word": (lambda t: t.assign(delta=t.delta.where(t.index != 7, "10^-5")),
                           r"delta must be a plain number"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_in_one_sentence(text, name):
    damage, sentence = DAMAGE[name]
    def check(text):
        _check_columns(text)
        _check_numbers(text)
    check(text)
    with pytest.raises(ValueError, match=sentence) as caught: check(damage(text))
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_refused_on_loading(tmp_path, monkeypatch):
    shutil.copytree(files("dp_companion") / "published", tmp_path / "published",
                    ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(published, "files", lambda package: tmp_path)
    assert len(load("sad")) == 18
    path = tmp_path / "published" / "sad.csv"
    path.write_text(path.read_text().replace("80.68", "8O.68"))
    with pytest.raises(ValueError,
                       match="value must be a plain number, got value=8O.68 in sad, Table II"):
        load("sad")


def test_an_unknown_paper_is_refused():
    with pytest.raises(ValueError, match="paper must be one of .*, got paper=sgd"):
        load("sgd")


def test_printed_decimals():
    assert [printed_decimals(v) for v in ("88.0200", "80", "0.5")] == [4, 0, 1]
