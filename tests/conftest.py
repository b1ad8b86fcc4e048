import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def root():
    return ROOT
