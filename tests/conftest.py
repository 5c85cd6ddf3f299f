"""Which tests of large families run in every change, and which only in the thorough run.

Some families run one check for each of hundreds of parameters. ``ci/cpu.sh`` runs a part of them,
evenly spread, and ``ci/cpu.sh --thorough`` all. The part is the same in every run.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent

ONE_OF = {
    "faulty_steps/test_keys.py": 8,
    "faulty_steps/test_reports.py": 8,
    "diagnosis/names/test_claims.py": 8,
}
"""File -> n, where every n-th of its tests, in the order of their names, runs in every change."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    families = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.path.is_relative_to(HERE):
            families[item.path.relative_to(HERE).as_posix()].append(item)
    for file, n in ONE_OF.items():
        for number, item in enumerate(sorted(families[file], key=lambda one: one.nodeid)):
            if number % n:
                item.add_marker(pytest.mark.thorough)
