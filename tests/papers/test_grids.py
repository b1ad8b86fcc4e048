"A grid that is killed again and again ends with the records of one process."
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from dp_companion.papers.grids import grid_report, write_specs
from dp_companion.training.grid import run_grid
from dp_companion.training.records import record_path
from grid_runs import CHECKOUT, digits_runs, workflow

pytest.importorskip("snakemake")
KILLS = 20


def tiny_specs(count): return digits_runs(count, epochs=1, expected_batch_size=256)


def kill_a_job(process, chance):
    "End one of the workflow's jobs without warning, and then ask the workflow to end."
    jobs = subprocess.run(["pgrep", "-g", str(process.pid), "-f", "dp-companion run"],
                          capture_output=True, text=True).stdout.split()
    if jobs: os.kill(int(chance.choice(jobs)), signal.SIGKILL)
    os.killpg(process.pid, signal.SIGTERM)
    try: process.wait(60)
    # Snakemake's handler of SIGTERM can wait for a lock that its own thread holds
    except subprocess.TimeoutExpired: kill_all(process)


def kill_all(process):
    "End the workflow and all its jobs without warning."
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def assert_as_alone(specs, runs, alone):
    "No record is missing, stale or of another run; each is that of one process."
    # after one epoch some seeds predict a single class: that is said too
    assert set(grid_report(specs, runs)["state"]) <= {"done", "collapsed"}
    run_grid(specs, alone, workers=1)
    for spec in specs:
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
        if number % 2: kill_a_job(process, chance)
        else: kill_all(process)
    # the workflow itself may give up after so many kills: somebody starts it again
    ended = any(workflow(grid, runs, tmp_path/"log.txt").wait(600) == 0 for _ in range(2))
    assert ended, (tmp_path/"log.txt").read_text()
    assert_as_alone(specs, runs, tmp_path/"alone")


@pytest.mark.slow
def test_a_run_that_fails_is_named_with_its_error(tmp_path):
    good, = tiny_specs(1)
    grid, runs = tmp_path/"grid", tmp_path/"runs"
    path, = write_specs([good], grid)
    (grid/"bad.json").write_text(path.read_text().replace('"mnist_cnn"', '"no_network"'))
    assert workflow(grid, runs, tmp_path/"log.txt", "--cores", "1", "--retries", "0").wait()
    said = (tmp_path/"log.txt").read_text()
    assert "job 0000: " in said and "no_network" in said.split("runs missing; ")[1]


SLURM = ("--executor", "slurm", "--jobs", "2", "--slurm-no-account", "--slurm-status-command",
         "squeue", "--slurm-init-seconds-before-status-checks", "3")
SCRIPT = CHECKOUT/"workflow/slurm_here.sh"
PATIENCE, EMPTY = 120, 20 # Seconds without a new record, or without a job, until somebody looks


def asked(*command):
    "What a command of Slurm prints; nothing while the controller is away."
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return found.stdout.split()


def pids(folder, what="dp-companion run"):
    "Processes of jobs that write into a folder."
    return [int(pid) for pid in asked("pgrep", "-f", f"{what} .*{folder}")]


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    "The folder of a Slurm of one node on this machine, for as long as the test runs."
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755) # munge's user must reach its files
    monkeypatch.setenv("SLURM_CONF", str(folder/"slurm.conf"))
    try:
        subprocess.run([SCRIPT, "start", folder], check=True, timeout=120)
        yield folder
    finally:
        asked("scancel", "--user=root")
        time.sleep(5)
        subprocess.run([SCRIPT, "stop", folder], timeout=120)
        left = pids(tmp_path) + pids(tmp_path, "snakemake") # of jobs whose shepherd was ended
        for job in left: os.kill(job, signal.SIGKILL)
        shutil.rmtree(folder)


class SlurmGrid:
    "A workflow through Slurm, and what somebody does who looks after it."
    def __init__(self, folder, grid, runs, log):
        self.folder, self.runs, self.rest = folder, runs, (grid, runs, log, *SLURM)
        self.process = workflow(*self.rest)

    def __len__(self): return len(list(self.runs.glob("*/record.json")))

    def is_over(self): return self.process.poll() is not None

    def restart(self):
        "End the workflow without warning, where it still runs, and start it again."
        if not self.is_over(): os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = workflow(*self.rest)

    def kill_controller(self):
        "Its successor has forgotten the last seconds, and calls the steps of its jobs invalid."
        os.kill(int((self.folder/"slurmctld.pid").read_text()), signal.SIGKILL)
        time.sleep(1)
        subprocess.run([SCRIPT, "controller", self.folder], check=True)
        asked("scancel", "--user=root")

    def kill_job(self, chance):
        until = time.monotonic() + EMPTY
        while not pids(self.runs) and time.monotonic() < until: time.sleep(.2)
        for job in chance.sample(pids(self.runs), 1) if pids(self.runs) else ():
            os.kill(job, signal.SIGKILL)

    def wait_for_more(self):
        "Whether a record has come; False where the workflow ended, or nothing moves."
        seen, start = len(self), time.monotonic()
        busy = start
        while not self.is_over() and len(self) == seen:
            time.sleep(2)
            subprocess.run([SCRIPT, "mend", self.folder], timeout=60)
            now = time.monotonic()
            if asked("squeue", "-h"): busy = now
            if now - start > PATIENCE or now - busy > EMPTY: break
        return len(self) > seen


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("DP_COMPANION_SLURM"), reason="starts daemons as root and "
                    "writes /etc/slurm: wants slurm-wlm, munge and DP_COMPANION_SLURM=1")
def test_a_killed_slurm_ends_with_the_records_of_one_process(tmp_path, slurm):
    specs, chance = tiny_specs(40), random.Random(0)
    grid, runs, log = tmp_path/"grid", tmp_path/"runs", tmp_path/"log.txt"
    write_specs(specs, grid)
    ours, records = SlurmGrid(slurm, grid, runs, log), []
    for number in range(KILLS): # every second one after a new record, else none might ever come
        moves = ours.wait_for_more() if number % 2 else True
        time.sleep(chance.uniform(0, 8))
        kind = chance.choice(("job", "controller", "workflow"))
        records.append((kind, len(ours)))
        if kind == "job": ours.kill_job(chance)
        if kind == "controller": ours.kill_controller()
        if kind == "workflow" or ours.is_over() or not moves: ours.restart()
        with log.open("a") as file: print(number, *records[-1], time.ctime(), file=file)
    for _ in range(10):
        while ours.wait_for_more(): pass
        if ours.process.poll() == 0: break
        asked("scancel", "--user=root")
        ours.restart()
    assert ours.process.poll() == 0, log.read_text()
    assert records[-1][1] > 0, records # the kills fell among the runs
    assert_as_alone(specs, runs, tmp_path/"alone")


def test_a_damaged_record_cannot_enter_a_table(tmp_path):
    spec, = tiny_specs(1)
    record_path(spec, tmp_path).parent.mkdir(parents=True)
    record_path(spec, tmp_path).write_text("{}")
    row, = grid_report([spec], tmp_path).itertuples()
    assert row.state == "stale" and "delete that file and run again" in row.why
