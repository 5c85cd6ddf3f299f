"""Under xdist the workers collect the tests: the first one hands its plan over to the controller.

With it goes how many tests were selected. It writes both to a file, since xdist itself tells the
controller only the ids of the tests.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest, planned
from ddp_equivalence.pytest_plugin.suite_run.selection import Selected, selected

FILE = "ddp_equivalence_plan"
"""The key of xdist's ``workerinput`` under which a worker finds the path of the file."""


class PlanHandedOver:
    """Registered in a worker: writes the plan once the tests are collected."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(tryfirst=True)  # before xdist tells the controller that the file is there
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tests = [asdict(test) for test in planned(session.items)]
        counts = selected(session.config)
        plan = {"tests": tests, "selected": None if counts is None else asdict(counts)}
        self._file.write_text(json.dumps(plan), encoding="utf-8")


def file_for(config: pytest.Config) -> Path | None:
    """Where this process is to write its plan; None if it is no worker that has to."""
    worker_input: dict[str, Any] = getattr(config, "workerinput", {})
    path = worker_input.get(FILE)
    return None if path is None else Path(path)


def read(file: Path) -> tuple[list[PlannedTest], Selected | None]:
    """The plan that a worker has written; empty if the worker could not write it."""
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [], None
    counts = plan["selected"]
    tests = [PlannedTest(**test) for test in plan["tests"]]
    return tests, None if counts is None else Selected(**counts)
