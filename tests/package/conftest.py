"""The suite checked against itself: what is broken here on purpose is not news for the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.package.ranks import misbehaviour_table


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.self_check)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    table = list(misbehaviour_table.lines([*stats.get("passed", []), *stats.get("failed", [])]))
    if table:
        terminalreporter.section("what ranks did wrong, and seconds until the verdict", "=")
        for line in table:
            terminalreporter.line(line)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs from processes that the test starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
