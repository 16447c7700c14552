"""What every test gets: one thread, one seed, and a pool of real ranks on request."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing: `from ranks import ...`

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """The same random numbers in each test, whichever ran before it."""
    import random

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session")
def ranks():
    """A pool of processes over gloo: `ranks.run(fn, *args, world_size=4, timeout=60)`, see ranks.py."""
    from ranks import pool

    yield pool
    pool.close()
