import multiprocessing
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def same_draws():
    "A test draws the same whichever tests ran before it; only secure noise differs."
    random.seed(0), np.random.seed(0)
    if "torch" in sys.modules: sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def processes():
    "Real processes that need not import torch: forks of one that did so and nothing else."
    multiprocessing.set_forkserver_preload(["dp_companion.cli", "dp_companion.training.training",
        "dp_companion.algorithms.privacy_engine", "papermill"])
    return multiprocessing.get_context("forkserver")
