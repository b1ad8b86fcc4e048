"""A grid of short runs that is killed again and again: `python tests/bench/grid_kills.py`.

Snakemake and all its jobs are ended without warning at random moments and started again. A row
of results/bench/grid_kills.csv says what of the records is missing, stale or doubled, and what
the engine costs beside the runs' own time.
"""
import argparse
import csv
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from dp_companion.papers.grids import grid_report, write_specs
from dp_companion.training.grid import run_grid
from dp_companion.training.records import record_path
sys.path.insert(0, str(Path(__file__).parents[1]))
from grid_runs import CHECKOUT, digits_runs, workflow

TO = CHECKOUT/"results/bench/grid_kills.csv"


def started(folder, per_job, cores):
    "The workflow in a process group of its own."
    return workflow(folder/"grid", folder/"runs", folder/"log.txt", "--cores", str(cores),
                    per_job=per_job)


def done(folder): return len(list((folder/"runs").glob("*/record.json")))


def killed_grid(folder, count, kills, per_job, cores):
    "Seconds that the grid took; each kill comes at a random number of records."
    chance, start = random.Random(0), time.monotonic()
    process = started(folder, per_job, cores)
    for at in sorted(chance.sample(range(count), kills)):
        while done(folder) <= at and process.poll() is None: time.sleep(.05)
        time.sleep(chance.uniform(0, 1)) # and at a random moment of a run
        if process.poll() is None: os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process = started(folder, per_job, cores)
    if process.wait(): raise SystemExit((folder/"log.txt").read_text())
    return time.monotonic() - start


def found(specs, folder):
    "How many records are missing, stale, or more than the runs; and of 20 runs, not as alone."
    states = list(grid_report(specs, folder/"runs")["state"])
    some = specs[::max(1, len(specs)//20)]
    run_grid(some, folder/"alone", workers=1)
    other = sum(record_path(spec, folder/"runs").read_bytes() !=
                record_path(spec, folder/"alone").read_bytes() for spec in some)
    return {"missing": states.count("missing"), "stale": states.count("stale"),
            "doubled": done(folder) - len({spec.name for spec in specs}), "unlike_alone": other}


def own_seconds(specs, folder):
    "Wall time of the runs themselves, as each wrote it beside its record."
    places = [record_path(spec, folder/"runs").with_name("timing.json") for spec in specs]
    return sum(json.loads(place.read_text())["wall_seconds"] for place in places)


def measured(folder, count, kills, per_job, cores):
    "One row of the table."
    specs = digits_runs(count, epochs=3, expected_batch_size=64)
    write_specs(specs, folder/"grid")
    wall = killed_grid(folder, count, kills, per_job, cores)
    own = own_seconds(specs, folder)
    return {"runs": count, "kills": kills, "per_job": per_job, "cores": cores,
            **found(specs, folder), "wall_seconds": round(wall, 1), "own_seconds": round(own, 1),
            "overhead": round(cores*wall/own - 1, 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--per-job", type=int, default=50)
    parser.add_argument("--cores", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measured(Path(folder), asked.runs, asked.kills, asked.per_job, asked.cores)
    rows = list(csv.DictReader(TO.open())) if TO.exists() else []
    key = {name: str(row[name]) for name in ("runs", "kills", "per_job", "cores")}
    rows = [old for old in rows if not key.items() <= old.items()] + [row]
    with TO.open("w", newline="") as file:
        table = csv.DictWriter(file, row, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(json.dumps(row))


if __name__ == "__main__": main()
