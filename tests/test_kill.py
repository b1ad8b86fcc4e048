"A run that is killed at any moment and started again ends with the same record, to the bit."
import json
import os
import signal
import subprocess
import sys
import time

import pytest

SPEC = dict(paper="global_adapt_v2", method="DP-SGD-Global-Adapt-V2-S", dataset="digits", model="mnist_cnn", clip_rule="global_adapt_v2", strict_max_grad_norm=3.,
            bound_decay_rate=.5, noise_multiplier=3., decay="step", decay_rate=.5, drop_every=2, accounting="as_printed", target_epsilon=1., epochs=6,
            expected_batch_size=64, seed=0)
CODE = "import torch; torch.set_num_threads(1); from dp_companion.cli import main; main()"


def start(folder):
    (folder/"spec.json").write_text(json.dumps(SPEC))
    return subprocess.Popen([sys.executable, "-c", CODE, "run", "spec.json"], cwd=folder, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_killed_run_ends_the_same(tmp_path):
    whole, killed = tmp_path/"whole", tmp_path/"killed"
    whole.mkdir(), killed.mkdir()
    assert start(whole).wait() == 0
    for wait in (.05, .3): # once at the first checkpoint, once later
        run, deadline = start(killed), time.time() + 120
        while not list(killed.glob("runs/*/checkpoint.pt")) and run.poll() is None and time.time() < deadline: time.sleep(.02)
        time.sleep(wait)
        os.kill(run.pid, signal.SIGKILL) if run.poll() is None else None
        run.wait()
    assert start(killed).wait() == 0
    (a,), (b,) = (list(f.glob("runs/*/record.json")) for f in (whole, killed))
    assert a.read_bytes() == b.read_bytes()
    assert sorted(p.name for p in b.parent.iterdir() if not p.name.startswith(".")) == ["record.json", "timing.json"]
