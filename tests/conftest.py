"""Which tests run in every change, and which only in the thorough run.

``ci/cpu.sh`` runs with ``--ddp-pairwise``, as ``ddp-equivalence run`` does: of the catalogue and
the planted faults it chooses few tests that have every pair of values, and it leaves out tests with
the mark ``thorough``. Of the folders and files below it runs every n-th test, in the order of their
names. ``ci/cpu.sh --thorough`` runs all tests. The part is the same in every run.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent

ONE_OF = {
    "package/commands": 4,
    "package/observed_scripts": 4,
    "package/observed_scripts/test_commands_and_files.py": 3,
    "package/observed_scripts/test_observed_scripts.py": 6,
    "package/pytest_plugin": 4,
    "package/report": 6,
}
"""Folder or file -> n, where every n-th test of each file runs in every change, so at least one.
The longest name counts. A file that is not named runs whole."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_file = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.path.is_relative_to(HERE):
            by_file[item.path.relative_to(HERE).as_posix()].append(item)
    for file, of_file in by_file.items():
        n = one_of(file)
        for number, item in enumerate(sorted(of_file, key=lambda one: one.nodeid)):
            if number % n:
                item.add_marker(pytest.mark.thorough)
    if config.getoption("--ddp-pairwise"):
        left_out = [item for item in items if item.get_closest_marker("thorough") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("thorough") is None]


def one_of(file: str) -> int:
    """The n of a file of tests."""
    names = [name for name in ONE_OF if file == name or file.startswith(f"{name}/")]
    return ONE_OF[max(names, key=len)] if names else 1
