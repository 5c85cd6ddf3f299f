"""Every test starts its ranks with mp.spawn; the ranks assert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing as multiprocessing
from the_check import CHECKS, RANKS, check_in_new_group


@pytest.mark.parametrize("seed", range(CHECKS))
def test_step(tmp_path: Path, seed: int) -> None:
    """One check."""
    multiprocessing.spawn(check_in_new_group, (str(tmp_path / "store"), seed), nprocs=RANKS)
