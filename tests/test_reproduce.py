"Executing notebooks: found again, resumed after a kill, and never a page from the wrong parameters."
import json
import os
import signal
import subprocess
import sys
import time

import pytest

KERNEL = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
PAGE = ["x = 1 + 1\nx"]
EXPERIMENT = ["profile = 'digits'\nruns = 'runs'", "from dp_companion.workbench.notebooks import saw\nsaw(profile=profile, runs=runs)",
              """from dp_companion.workbench.grid import run_grid
from dp_companion.workbench.records import RunSpec
specs = [RunSpec(paper="global_adapt_v2", method="DP-SGD", dataset="digits", model="mnist_cnn", clip_rule="flat", noise_multiplier=2., accounting="as_printed",
                 target_epsilon=1., epochs=3, expected_batch_size=128, seed=seed) for seed in range(3)]
[r.final["test_accuracy"] for r in run_grid(specs, runs)]"""]
CODE = """from pathlib import Path
from dp_companion.workbench.notebooks import execute_all
execute_all(Path("nbs"), Path("runs/notebooks/digits"), profile="digits", runs=Path("runs"))"""


def notebook(path, sources):
    cells = [{"cell_type": "code", "execution_count": None, "id": f"c{i}", "metadata": {"tags": ["parameters"]} if "runs = 'runs'" in s else {}, "outputs": [], "source": s} for i, s in enumerate(sources)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}))


def project(folder):
    notebook(folder/"nbs"/"page.ipynb", PAGE)
    notebook(folder/"nbs"/"experiments"/"toy.ipynb", EXPERIMENT)
    return folder


def start(folder): return subprocess.Popen([sys.executable, "-c", CODE], cwd=folder, stderr=subprocess.DEVNULL, start_new_session=True)
def records(folder): return {p.parent.name: p.read_bytes() for p in folder.glob("runs/*/record.json")}


@pytest.mark.slow
def test_killed_anywhere_and_started_again_ends_the_same(tmp_path):
    whole, killed = project(tmp_path/"whole"), project(tmp_path/"killed")
    assert start(whole).wait() == 0
    assert len(records(whole)) == 3
    for seconds in (4, 9): # before the first record, and between records
        run = start(killed)
        time.sleep(seconds)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert start(killed).wait() == 0
    assert records(killed) == records(whole)
    assert sorted(p.name for p in (killed/"runs"/"notebooks"/"digits").rglob("*.ipynb")) == ["page.ipynb", "toy.ipynb"]

    written = {p: p.stat().st_mtime_ns for p in whole.glob("runs/*/record.json")}
    assert start(whole).wait() == 0 # everything is found
    assert {p: p.stat().st_mtime_ns for p in whole.glob("runs/*/record.json")} == written


def test_a_failing_experiment_is_one_sentence_and_no_page(tmp_path):
    notebook(tmp_path/"nbs"/"experiments"/"toy.ipynb", [*EXPERIMENT[:2], "1/0"])
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "notebook must run to its end, got ZeroDivisionError" in done.stderr
    assert not list(tmp_path.glob("runs/notebooks/**/*.ipynb"))


def test_a_damaged_record_stops_the_page(tmp_path):
    project(tmp_path)
    assert start(tmp_path).wait() == 0
    record = next(tmp_path.glob("runs/*/record.json"))
    record.write_bytes(record.read_bytes().replace(b'"test_accuracy": 0.', b'"test_accuracy": 1.', 1))
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "record must be whole and unchanged, got another content than its digest says" in done.stderr
