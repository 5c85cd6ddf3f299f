"""Fixtures of the tests that disturb a run and look at what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.package.ranks import marked_run
from tests.package.ranks.marked_run import MarkedRun


@pytest.fixture
def user_run(tmp_path: Path) -> Iterator[MarkedRun]:
    """A run of a user's tests; whatever it leaves running is killed afterwards."""
    with marked_run.marked_run(tmp_path) as run:
        yield run
