"The minutes on a GPU, in small: they end in time, and their records are whole and resumable."
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dp_companion.training.records import read_record, record_path
from dp_companion.training.training import train

ROOT = Path(__file__).parents[1]


def script():
    "workflow/gpu.py as a module."
    spec = importlib.util.spec_from_file_location("gpu", ROOT/"workflow/gpu.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.slow
def test_a_small_table_is_trained_in_time(tmp_path):
    command = [sys.executable, ROOT/"workflow/gpu.py", "--device", "cpu", "--minutes", "5", "--out",
               tmp_path, "--parts", "times,table"]
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.time() - started < 60*5
    rows = [line.split(",") for line in (tmp_path/"table4.csv").read_text().splitlines()]
    assert len(rows) == 5 and all(row[4] == row[5] == "2" for row in rows[1:])
    for row in rows[1:]:
        record = read_record(tmp_path/"records"/f"{row[3]}.json")
        assert record.spec.method.name == row[0] and len(record.epochs) == 2
        assert round(record.final["test_accuracy"], 4) == float(row[6])
    times, = json.loads((tmp_path/"step_times.json").read_text())["rows"]
    assert {"ordinary", "book", "ghost", "hooks"} == set(times["ratios"])
    assert json.loads((tmp_path/"machine.json").read_text())["device"] == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("stack", [1, 2])
def test_table_whose_time_is_up_goes_on_where_it_stopped(tmp_path, stack):
    from dp_companion.papers.grids import write_specs
    gpu = script()
    specs = gpu.table4(tmp_path/"runs", is_small=True)[:2]
    write_specs(specs, tmp_path/"specs")
    names = [spec.name for spec in specs]
    with pytest.raises(SystemExit) as ended:
        gpu.train_until(names, tmp_path, time.time() + .01, stack)
    assert ended.value.code == 0 and not list(tmp_path.glob("runs/*/record.json"))
    gpu.train_until(names[:stack], tmp_path, time.time() + 3600, stack)
    gpu.write_table(specs, tmp_path)
    for spec in specs[:stack]:
        record = read_record(tmp_path/"records"/f"{spec.name}.json")
        alone = train(spec, tmp_path/"alone")
        assert record.budget == alone.budget and len(record.epochs) == 2
        if stack == 1: assert record.epochs == alone.epochs
        assert not record_path(spec, tmp_path/"runs").with_name("checkpoint.pt").exists()
