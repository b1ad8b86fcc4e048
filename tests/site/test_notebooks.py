"Executing notebooks: found again, resumed after a kill, never with the wrong parameters."
import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from dp_companion.training.grid import run_grid
from dp_companion.site.notebooks import committed_keys, execute_all, refresh_pages
from dp_companion.site.page_keys import KEPT

KERNEL = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
PAGE = ["x = 1 + 1\nx"]
SPECS = """from dp_companion.training.grid import run_grid
from dp_companion.training.spec import run_spec
specs = [run_spec(paper="global_adapt_v2", method="DP-SGD", dataset="digits", model="mnist_cnn",
                 clip_rule="flat", noise_multiplier=2., accounting="as_printed", target_epsilon=1.,
                 epochs=3, expected_batch_size=128, seed=seed) for seed in range(3)]"""
TRAIN = f"""{SPECS}
from dp_companion.papers.tables import provenance_line
provenance_line(run_grid(specs, runs, workers=1), profile)"""
EXPERIMENT = ["profile = 'digits'\nruns = 'runs'",
              "from dp_companion.site.parameters import report_parameters\n"
              "report_parameters(profile=profile, runs=runs)", TRAIN]


def notebook(path, sources):
    cells = [{"cell_type": "code", "execution_count": None, "id": f"c{i}",
              "metadata": {"tags": ["parameters"]} if "runs = 'runs'" in s else {}, "outputs": [],
              "source": s} for i, s in enumerate(sources)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": KERNEL, "nbformat": 4,
                                "nbformat_minor": 5}))


def project(folder):
    notebook(folder/"nbs"/"page.ipynb", PAGE)
    notebook(folder/"nbs"/"experiments"/"toy.ipynb", EXPERIMENT)
    return folder


def execute(folder):
    "What `make reproduce` executes, on one core."
    os.chdir(folder)
    execute_all(Path("nbs"), Path("runs/notebooks/digits"), profile="digits", runs=Path("runs"),
                workers=1)


def start(processes, folder):
    process = processes.Process(target=execute, args=(folder,))
    process.start()
    return process


def kill(process):
    "At once, with the kernels that it has started."
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in family: one.kill()
    psutil.wait_procs(family[1:])


def ends(process):
    process.join(300)
    return process.exitcode


def records(folder):
    return {p.parent.name: p.read_bytes() for p in folder.glob("runs/*/record.json")}
def written(folder):
    return {p: p.stat().st_mtime_ns for p in [*folder.glob("runs/*/record.json"),
        *folder.glob("runs/notebooks/digits/page.ipynb")]}


@pytest.mark.slow
def test_killed_anywhere_and_started_again_ends_the_same(tmp_path, processes):
    whole, killed = project(tmp_path/"whole"), project(tmp_path/"killed")
    assert ends(start(processes, whole)) == 0
    assert len(records(whole)) == 3
    seen = {}
    # before the first record, and between records
    for moment in ("runs/notebooks/digits/page.ipynb", "runs/*/record.json"):
        run, deadline = start(processes, killed), time.monotonic() + 120
        while not list(killed.glob(moment)) and run.is_alive() and time.monotonic() < deadline:
            time.sleep(.01)
        kill(run)
        assert ends(run) == -signal.SIGKILL
        assert seen.items() <= written(killed).items() # found, not made again
        seen = written(killed)
    assert len(seen) > 1
    assert ends(start(processes, killed)) == 0
    assert records(killed) == records(whole)
    assert seen.items() <= written(killed).items()
    assert sorted(p.name for p in (killed/"runs"/"notebooks"/"digits").rglob("*.ipynb")) == [
        "page.ipynb", "toy.ipynb"]


@pytest.mark.slow
def test_a_failing_experiment_is_one_sentence_and_no_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook(tmp_path/"nbs"/"experiments"/"toy.ipynb", [*EXPERIMENT[:2], "1/0"])
    with pytest.raises(RuntimeError, match="notebook must run to its end, got ZeroDivisionError"):
        execute(tmp_path)
    assert not list(tmp_path.glob("runs/notebooks/**/*.ipynb"))


@pytest.mark.slow
def test_a_damaged_record_stops_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook(tmp_path/"nbs"/"experiments"/"toy.ipynb", EXPERIMENT)
    names = {}
    exec(SPECS, names)
    run_grid(names["specs"], workers=1)
    record = next(tmp_path.glob("runs/*/record.json"))
    damaged = record.read_bytes().replace(b'"test_accuracy": 0.', b'"test_accuracy": 1.', 1)
    assert damaged != record.read_bytes()
    record.write_bytes(damaged)
    with pytest.raises(RuntimeError,
                       match="record must be whole and unchanged, got content that does not "
                       "match its digest"):
        execute(tmp_path)
    assert not list(tmp_path.glob("runs/notebooks/**/*.ipynb"))


@pytest.mark.slow
def test_kept_experiments_are_trained_only_on_demand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path/"nbs"/"experiments"/"toy.ipynb"
    notebook(page, [*EXPERIMENT[:2], EXPERIMENT[2].replace("range(3)", "range(1)").replace(
        "epochs=3", "epochs=1")])
    content = json.loads(page.read_text())
    content["cells"][0]["metadata"]["tags"].append(KEPT)
    page.write_text(json.dumps(content))
    refresh_pages(workers=1)
    first, = tmp_path.glob("runs/*/record.json")
    assert json.loads(page.read_text())["cells"][2]["outputs"]
    assert committed_keys(Path("nbs")).keys() == {"experiments/toy.ipynb"}
    first.unlink()
    shutil.rmtree(tmp_path/"runs"/"notebooks")
    execute(tmp_path) # as in a fresh clone
    shown = json.loads(Path("runs/notebooks/digits/experiments/toy.ipynb").read_text())
    assert shown["cells"][2]["outputs"] and not list(tmp_path.glob("runs/*/record.json"))
    execute_all(Path("nbs"), Path("runs/notebooks/digits"), profile="digits", runs=Path("runs"),
                workers=1, everything=True)
    assert first.exists()
