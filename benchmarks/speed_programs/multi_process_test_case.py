"""PyTorch's MultiProcessTestCase starts new ranks for every test; the ranks assert."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from the_check import CHECKS, RANKS, check_on_rank, join_group
from torch.testing._internal.common_distributed import MultiProcessTestCase


class TestStep(MultiProcessTestCase):
    """One test for each seed."""

    @property
    def world_size(self) -> int:
        return RANKS

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        super().tearDown()
        with suppress(FileNotFoundError):  # The store may have removed it.
            os.remove(self.file_name)


def one_test(seed: int) -> Callable[[TestStep], None]:
    """A test method that makes the check with this seed."""

    def test(self: TestStep) -> None:
        join_group(self.rank, self.file_name)
        check_on_rank(seed, self.rank)

    return test


for seed in range(CHECKS):
    setattr(TestStep, f"test_seed_{seed:04d}", one_test(seed))
