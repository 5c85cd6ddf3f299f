"""PyTorch's MultiProcContinuousTest keeps its ranks for a class of tests; the ranks assert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from the_check import CHECKS, RANKS, check_on_rank
from torch.testing._internal.common_distributed import MultiProcContinuousTest


class TestStep(MultiProcContinuousTest):
    """One test for each seed."""

    world_size = RANKS

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        torch.set_num_threads(1)
        super()._init_pg(rank, world_size, rdvz_file)


def one_test(seed: int) -> Callable[[TestStep], None]:
    """A test method that makes the check with this seed."""

    def test(self: TestStep) -> None:
        check_on_rank(seed, self.rank)

    return test


for seed in range(CHECKS):
    setattr(TestStep, f"test_seed_{seed:04d}", one_test(seed))
