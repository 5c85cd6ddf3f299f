"""The floor as tests: it adds the time of pytest, but no harness."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from bare import bare_ranks, check
from the_check import CHECKS


@pytest.fixture(scope="session")
def ranks() -> Iterator[tuple[Connection, ...]]:
    """Bare ranks for all tests."""
    with bare_ranks() as connections:
        yield connections


@pytest.mark.parametrize("seed", range(CHECKS))
def test_step(ranks: tuple[Connection, ...], seed: int) -> None:
    """One check."""
    check(seed, ranks)
