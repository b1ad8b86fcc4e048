"A grid that is killed again and again ends with the records of one process."
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dp_companion.papers.grids import grid_report, write_specs
from dp_companion.training.grid import run_grid
from dp_companion.training.records import record_path
from dp_companion.training.spec import run_spec

pytest.importorskip("snakemake")
CHECKOUT = Path(__file__).parents[2]
KILLS = 20


def tiny_specs(count):
    "Runs of one epoch on the digits, which differ by their seed."
    return [run_spec(paper="global_adapt_v2", method="DP-SGD", clip_rule="flat", dataset="digits",
                     model="mnist_cnn", accounting="as_printed", target_epsilon=1.,
                     noise_multiplier=2., epochs=1, expected_batch_size=256, seed=seed)
            for seed in range(count)]


def workflow(grid, runs, log):
    "The workflow, started in a process group of its own."
    command = [sys.executable, "-m", "snakemake", "--snakefile", CHECKOUT/"workflow/Snakefile",
               "--nolock", "--keep-going", "--keep-incomplete", "--rerun-incomplete",
               "--rerun-triggers", "mtime", "--cores", "2", "--quiet", "all",
               "--config", f"grid={grid}", f"runs={runs}", "per_job=4"]
    return subprocess.Popen(command, cwd=log.parent, start_new_session=True,
                            stdout=log.open("a"), stderr=subprocess.STDOUT)


def kill(process, whole_group, chance):
    "End the workflow and all its jobs without warning, or one of its jobs."
    if whole_group: return os.killpg(process.pid, signal.SIGKILL)
    jobs = subprocess.run(["pgrep", "-g", str(process.pid), "-f", "dp-companion run"],
                          capture_output=True, text=True).stdout.split()
    if jobs: os.kill(int(chance.choice(jobs)), signal.SIGKILL)


def assert_as_alone(specs, runs, alone):
    "No record is missing, stale or of another run; every fourth is that of one process."
    # after one epoch some seeds predict a single class: that is said too
    assert set(grid_report(specs, runs)["state"]) <= {"done", "collapsed"}
    run_grid(specs[::4], alone, workers=1)
    for spec in specs[::4]:
        assert record_path(spec, runs).read_bytes() == record_path(spec, alone).read_bytes()
    extra = {path.name for path in runs.iterdir()} - {spec.name for spec in specs}
    assert extra <= {"cache"}, "a run that nobody asked for"


@pytest.mark.slow
def test_killed_grid_ends_with_the_records_of_one_process(tmp_path):
    specs, chance = tiny_specs(40), random.Random(0)
    grid, runs = tmp_path/"grid", tmp_path/"runs"
    write_specs(specs, grid)
    for number in range(KILLS):
        process = workflow(grid, runs, tmp_path/"log.txt")
        time.sleep(chance.uniform(2, 9))
        kill(process, whole_group=number % 2 == 0, chance=chance)
        if number % 2: os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    assert workflow(grid, runs, tmp_path/"log.txt").wait() == 0, (tmp_path/"log.txt").read_text()
    assert_as_alone(specs, runs, tmp_path/"alone")


def test_a_damaged_record_cannot_enter_a_table(tmp_path):
    spec, = tiny_specs(1)
    record_path(spec, tmp_path).parent.mkdir(parents=True)
    record_path(spec, tmp_path).write_text("{}")
    row, = grid_report([spec], tmp_path).itertuples()
    assert row.state == "stale" and "delete that file and run again" in row.why
