"A run that is killed at any moment and started again ends with the same record, to the bit."
import json
import signal
import time
from threading import Thread
from types import SimpleNamespace

import pytest
from filelock import FileLock

from dp_companion.cli import main
from dp_companion.training import training
from dp_companion.training.records import record_path
from dp_companion.training.spec import spec_from_dict

METHOD = dict(name="DP-SGD-Global-Adapt-V2-S", clip_rule="global_adapt_v2", strict_max_grad_norm=3.,
              bound_decay_rate=.5,
              noise_multiplier=3., decay="step", decay_rate=.5, drop_every=2)
SPEC = dict(paper="global_adapt_v2", method=METHOD, dataset="digits", model="mnist_cnn",
            accounting="as_printed",
            target_epsilon=1., epochs=12, expected_batch_size=64, seed=0)


def start(processes, folder):
    "`dp-companion run`, in a process of its own."
    folder.mkdir(exist_ok=True)
    (folder/"spec.json").write_text(json.dumps(SPEC))
    run = processes.Process(target=main, args=(["run", str(folder/"spec.json"), "--runs",
        str(folder/"runs")],))
    run.start()
    return run


def ends(run):
    run.join(300)
    return run.exitcode


def checkpoints(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/checkpoint.pt")}


@pytest.mark.slow
def test_killed_run_ends_the_same(tmp_path, processes):
    whole, killed = tmp_path/"whole", tmp_path/"killed"
    assert ends(start(processes, whole)) == 0
    for wait in (0, .05): # just after the first checkpoint that it wrote, and a little later
        seen, run, deadline = checkpoints(killed), start(processes, killed), time.monotonic() + 120
        while checkpoints(killed) == seen and run.is_alive() and time.monotonic() < deadline:
            time.sleep(.002)
        time.sleep(wait)
        run.kill()
        assert ends(run) == -signal.SIGKILL and not list(killed.glob("runs/*/record.json"))
    assert ends(start(processes, killed)) == 0
    (a,), (b,) = (list(f.glob("runs/*/record.json")) for f in (whole, killed))
    assert a.read_bytes() == b.read_bytes()
    assert sorted(p.name for p in b.parent.iterdir() if not p.name.startswith(".")) == [
        "record.json", "timing.json"]


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path, monkeypatch):
    spec, trained = spec_from_dict(SPEC), []
    run = SimpleNamespace(epochs=[], is_over=True, checked=lambda report: report)
    monkeypatch.setattr(training, "prepared", lambda *asked: (run, trained.append(asked), None))
    monkeypatch.setattr(training, "finish", lambda *_: None)
    record_path(spec, tmp_path).parent.mkdir()
    waits = Thread(target=training.train, args=(spec, tmp_path, "its data"))
    # as a process that trains it has it
    with FileLock(record_path(spec, tmp_path).with_name(".lock")):
        waits.start()
        waits.join(1)
        assert waits.is_alive() and not trained
    waits.join(10)
    assert trained == [(spec, tmp_path, "its data")]
