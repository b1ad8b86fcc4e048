"Short runs on the digits, and the workflow that trains them."
import subprocess
import sys
from pathlib import Path

from dp_companion.training.spec import run_spec

CHECKOUT = Path(__file__).parents[1]


def digits_runs(count, epochs, expected_batch_size):
    "Runs that differ by their seed."
    return [run_spec(paper="global_adapt_v2", method="DP-SGD", clip_rule="flat", dataset="digits",
                     model="mnist_cnn", accounting="as_printed", target_epsilon=1.,
                     noise_multiplier=2., epochs=epochs, expected_batch_size=expected_batch_size,
                     seed=seed)
            for seed in range(count)]


def workflow(grid, runs, log, *executor, per_job=4):
    "The workflow, started in a process group of its own."
    executor = executor or ("--cores", "2")
    command = [sys.executable, "-m", "snakemake", "--snakefile", CHECKOUT/"workflow/Snakefile",
               "--nolock", "--keep-going", "--keep-incomplete", "--rerun-incomplete",
               "--rerun-triggers", "mtime", *executor,
               "--config", f"grid={grid}", f"runs={runs}", f"per_job={per_job}"]
    return subprocess.Popen(command, cwd=log.parent, start_new_session=True,
                            stdout=log.open("a"), stderr=subprocess.STDOUT)
