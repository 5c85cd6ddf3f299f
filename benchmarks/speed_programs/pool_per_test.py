"""Every test forks a pool of processes from a server, as DeepSpeed's tests do.

DeepSpeed also sleeps for half a second after every test; this program does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing as multiprocessing
from the_check import CHECKS, RANKS, check_in_new_group

TIMEOUT = 600.0


@pytest.mark.parametrize("seed", range(CHECKS))
def test_step(tmp_path: Path, seed: int) -> None:
    """One check."""
    pool = multiprocessing.get_context("forkserver").Pool(RANKS)
    try:
        work = [(rank, str(tmp_path / "store"), seed) for rank in range(RANKS)]
        pool.starmap_async(check_in_new_group, work, chunksize=1).get(TIMEOUT)
    finally:
        pool.close()
        pool.join()
