"""Start the fork server before the first test needs it, as the server's import of torch is slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
