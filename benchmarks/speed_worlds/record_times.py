"""A pytest plugin that writes when each test began; the same for every harness under pytest."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

starts: list[float] = []
compared: list[float] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    """A test begins, before its fixtures and with all that pytest does for it."""
    starts.append(time.monotonic())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that has passed has compared."""
    if report.when == "call" and report.passed:
        compared.append(time.monotonic())


def pytest_sessionfinish() -> None:
    """Write what was recorded."""
    first = compared[0] if compared else None
    times = {"starts": starts, "first_comparison": first, "passed": len(compared)}
    Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(times))
