"""The ranks of a pytest run: when their server starts, for how many workers, and the fixture."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.report.record import Record
from ddp_equivalence.report.text import plural

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict


# Start the fork server before the first test needs it, as the server's import of torch is slow.

_started = pytest.StashKey[bool]()

USES_THIS_PACKAGE = re.compile(
    rb"\bddp_equivalence\b|\bequivalence\.(check|assert_equivalent)\b",
)
"""Matches in every test file that compares something with one big batch."""


def start_for(file: Path, config: pytest.Config) -> None:
    """Start the server, once, while pytest imports the first file that uses this package."""
    if config.stash.get(_started, False) or not _runs_tests(config):
        return
    if file.suffix == ".py" and _uses_this_package(file):
        from ddp_equivalence.ranks.server import start_early

        config.stash[_started] = True
        start_early()


def _runs_tests(config: pytest.Config) -> bool:
    return not config.getoption("collectonly") and not config.getoption("--ddp-plan")


def _uses_this_package(file: Path) -> bool:
    try:
        return USES_THIS_PACKAGE.search(file.read_bytes()) is not None
    except OSError:  # pytest will say why the file cannot be read
        return False


# At most one worker of pytest-xdist for each GPU.
#
# A set of ranks that works has its GPUs for itself: kernels of NCCL wait busily for the other
# ranks, so that several sets on one GPU would take each other's time. More workers would wait for
# the GPU in turn, and each would start ranks of its own there.

WHY = "ranks of several workers would wait in turn for the same GPU"


def fewer(config: pytest.Config, gpus: int) -> str:
    """Lower the number of workers to that of GPUs, before xdist starts them.

    Returns what was changed, or "". Without GPUs nothing is changed.
    """
    given = config.getoption("numprocesses", None) or 0
    if not 0 < gpus < given:
        return ""
    if gpus == 1:
        config.option.dist, config.option.numprocesses, config.option.tx = "no", 0, []
        return f"-n {given} became one process, as there is one GPU: {WHY}"
    config.option.numprocesses, config.option.tx = gpus, ["popen"] * gpus
    return f"-n {given} became -n {gpus}, one worker for each GPU: {WHY}"


def too_many(config: pytest.Config, records: Sequence[Record]) -> str:
    """What the table says of a run with more workers than GPUs; "" otherwise."""
    workers = config.getoption("numprocesses", None) or 0
    if not workers or not any(record.gpu for record in records):
        return ""
    from ddp_equivalence.pytest_plugin.suite_run.gpus_used import gpus_used  # imports torch

    gpus = gpus_used(records)
    if len(gpus) >= workers:
        return ""
    count = f"{len(gpus)} {plural(len(gpus), 'GPU that was', 'GPUs that were')} used"
    return f"-n {workers} was more than the {count}: {WHY}; fewer workers may be faster"


# The ``equivalence`` fixture.


class Equivalence:
    """``check`` and ``assert_equivalent``, imported when they are first used."""

    @property
    def check(self) -> Callable[..., Verdict]:
        from ddp_equivalence.checking.check import check

        return check

    @property
    def assert_equivalent(self) -> Callable[..., Verdict]:
        from ddp_equivalence.checking.check import assert_equivalent

        return assert_equivalent


@pytest.fixture(scope="session")
def equivalence() -> Equivalence:
    """Compare with one big batch: ``equivalence.assert_equivalent(Case(...), my_step)``."""
    return Equivalence()
