"The committed table of timings is made from the runs that were timed; a dry run prices a profile."
import pandas as pd
import pytest

from dp_companion.cli import main
from dp_companion.papers.costs import (
    COLUMNS, RUN_COLUMNS, RUN_SECONDS, TIMINGS, csv_text, planned_costs, read_rows, timing_rows
)
from dp_companion.papers.grids import papers_with_grids, table_runs


def test_the_committed_table_is_what_the_runs_give(root):
    results = root/"results"
    runs = read_rows(results/RUN_SECONDS)
    assert len(runs) > 700 and len({row["run"] for row in runs}) == len(runs)
    assert (results/RUN_SECONDS).read_text() == csv_text(runs, RUN_COLUMNS)
    assert (results/TIMINGS).read_text() == csv_text(timing_rows(runs), COLUMNS)
    assert all(float(row["wall_seconds"]) > 0 and row["steps"] >= row["epochs"] for row in runs)


def test_a_slower_run_changes_the_table(root):
    runs = read_rows(root/"results"/RUN_SECONDS)
    slower = [row | {"wall_seconds": "1e6", "cpu_seconds": ""} for row in runs]
    assert csv_text(timing_rows(slower), COLUMNS) != (root/"results"/TIMINGS).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["digits", "laptop", "paper"])
def test_every_profile_is_priced(root, profile):
    costs = planned_costs(profile, results=root/"results")
    assert {"global_adapt_v2", "sad", "adaptive_noise", "sanitization"} <= set(costs["paper"])
    assert (costs["timed"] <= costs["runs"]).all()
    for row in costs.itertuples():
        assert pd.notna(row.cpu_hours) == (row.timed > 0) # no number where nothing was timed
    if profile == "digits": assert (costs["timed"] == costs["runs"]).all()


@pytest.mark.slow
def test_the_counted_runs_are_those_that_train(tmp_path):
    counted = planned_costs("digits", "sad", "Table II")
    assert counted["runs"].tolist() == [len(table_runs("sad", "Table II", "digits", tmp_path))]


@pytest.mark.parametrize("words", [
    "grid --paper sad --table Table_II --dry-run --profile paper",
    "reproduce --only papers/sad --dry-run --profile laptop",
])
def test_a_dry_run_says_runs_and_hours_and_trains_nothing(root, tmp_path, monkeypatch, capsys,
                                                          words):
    monkeypatch.chdir(root)
    asked = [word.replace("_", " ") for word in words.split()]
    with pytest.raises(SystemExit) as end: main([*asked, "--runs", str(tmp_path/"runs")])
    said = capsys.readouterr().out
    assert end.value.code == 0 and not (tmp_path/"runs").exists()
    assert "CPU hours" in said and "GPU hours" in said and "Table II" in said
    assert "adaptive_noise" not in said


def test_an_unknown_table_is_one_sentence(capsys):
    with pytest.raises(SystemExit): main(["grid", "--paper", "sad", "--table", "2", "--dry-run"])
    assert "table must be one of Table II" in capsys.readouterr().err
    assert "sad" in papers_with_grids()
