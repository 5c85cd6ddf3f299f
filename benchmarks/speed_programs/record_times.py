"""A pytest plugin that writes when each test began; every harness under pytest uses it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from processor_time import check_begins, of_a_check

starts: list[float] = []
compared: list[float] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    """Record the start of a test, before pytest sets up its fixtures."""
    check_begins(len(starts))
    starts.append(time.monotonic())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record when a test has passed, and so has compared."""
    if report.when == "call" and report.passed:
        compared.append(time.monotonic())


def pytest_sessionfinish() -> None:
    """Write the recorded times."""
    first = compared[0] if compared else None
    times = {
        "starts": starts,
        "first_comparison": first,
        "passed": len(compared),
        "processor": of_a_check(),
    }
    Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(times))
