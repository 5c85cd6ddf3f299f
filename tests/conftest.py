"""Which tests run in every change, which only in the thorough run, and the names of their cases.

``ci/cpu.sh`` runs with ``--ddp-pairwise``, as ``ddp-equivalence run`` does: of the catalogue and
the planted faults it chooses few tests that have every pair of values, and it leaves out tests with
the mark ``thorough``. ``ci/cpu.sh --thorough`` runs all tests.
"""

from __future__ import annotations

import pytest

from ddp_equivalence.ranks import warm_ranks
from ddp_equivalence.ranks.lanes import cuda_devices


def pytest_configure(config: pytest.Config) -> None:
    """Let the ranks of several workers of xdist share the cores of a machine without GPUs. These
    ranks compute little, so that half of the cores would be idle if one worker waited for another.
    """
    if hasattr(config, "workerinput") and not cuda_devices():
        setattr(warm_ranks, "xdist_locks", lambda: None)  # noqa: B010  # mypy knows its type


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--ddp-pairwise"):
        left_out = [item for item in items if item.get_closest_marker("thorough") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("thorough") is None]


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Words that a report must have are no part of the name of their test. Reports print this name
    in the command that repeats the test, and would have the words in any case.
    """
    return argname if isinstance(val, str) and " " in val else None
