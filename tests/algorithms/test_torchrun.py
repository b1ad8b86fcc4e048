"DistributedDataParallel under torchrun: one batch, one noise, one ledger, however many processes."
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from test_trainers import SAID

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def torchrun(processes, out, steps, *more):
    "The job's exit status and its words."
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               processes, ROOT/"tests/torchrun_job.py", out, steps, *more]
    place = os.environ | {"OMP_NUM_THREADS": "1",
                          "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT/'tests'}"}
    done = subprocess.run([*map(str, command)], env=place, capture_output=True, text=True,
                          timeout=300)
    return done.returncode, done.stdout + done.stderr


def same_weights(some, other):
    "Up to rounding: two runs of one job differ by an ulp where MKL finds memory aligned otherwise."
    torch.testing.assert_close(some, other, rtol=0, atol=1e-12)


def found(out, processes):
    return [torch.load(out/f"rank{rank}.pt", weights_only=True) for rank in range(processes)]


def test_processes_take_the_same_steps_and_die_together(tmp_path):
    whole = {}
    for processes in (2, 4):
        status, words = torchrun(processes, tmp_path/str(processes), 6)
        assert status == 0, words
        of_all = found(tmp_path/str(processes), processes)
        for other, *_ in of_all: assert torch.equal(other, of_all[0][0])
        # a share each of one Poisson batch, and one ledger entry a step
        whole[processes] = [sum(sizes) for sizes in zip(*(sizes for _, sizes, _ in of_all))]
        assert {steps for *_, steps in of_all} == {6}
    assert whole[2] == whole[4] and len(set(whole[2])) > 1
    two, four = (found(tmp_path/str(processes), 1)[0][0] for processes in (2, 4))
    torch.testing.assert_close(four, two, rtol=0, atol=1e-9)
    # killed before its last step, after a checkpoint; then the rest of the run
    started = time.time()
    status, words = torchrun(4, tmp_path/"parts", 6, "--die", 2)
    assert status != 0 and time.time() - started < 120 and not list(tmp_path.glob("parts/rank*"))
    assert "Signal 9 (SIGKILL) received" in words and "rank      : 2 (local_rank: 2)" in words
    assert torchrun(4, tmp_path/"parts", 6)[0] == 0
    for weights, sizes, steps in found(tmp_path/"parts", 4):
        same_weights(weights, four)
        assert steps == 6 and len(sizes) == 3


@pytest.mark.parametrize("when", ["before", "never"])
def test_processes_of_accelerate_take_the_steps_of_a_plain_loop(when, tmp_path):
    pytest.importorskip("accelerate")
    for name, more in (("plain", []), ("accelerate", ["--accelerate", when])):
        status, words = torchrun(2, tmp_path/name, 4, *more)
        assert status == 0, words
    plain, accelerated = (found(tmp_path/name, 2) for name in ("plain", "accelerate"))
    for (weights, *counts), (other, *others) in zip(plain, accelerated, strict=True):
        same_weights(weights, other)
        assert counts == others


def test_a_returned_module_is_not_wrapped_again(tmp_path):
    pytest.importorskip("accelerate")
    row = "accelerate: `prepare(model)` after `make_private`, several processes"
    status, words = torchrun(2, tmp_path/"after", 4, "--accelerate", "after")
    assert status != 0 and SAID[row] in words and "the returned module inside one" in words
