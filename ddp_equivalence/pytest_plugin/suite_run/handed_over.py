"""Under xdist the workers collect the tests: the first one hands its plan over to the controller.

It writes the plan to a file, since xdist itself tells the controller only the ids of the tests.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest, planned

FILE = "ddp_equivalence_plan"
"""The key of xdist's ``workerinput`` under which a worker finds the path of the file."""


class PlanHandedOver:
    """Registered in a worker: writes the plan once the tests are collected."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(tryfirst=True)  # before xdist tells the controller that the file is there
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tests = [asdict(test) for test in planned(session.items)]
        self._file.write_text(json.dumps(tests), encoding="utf-8")


def file_for(config: pytest.Config) -> Path | None:
    """Where this process is to write its plan; None if it is no worker that has to."""
    worker_input: dict[str, Any] = getattr(config, "workerinput", {})
    path = worker_input.get(FILE)
    return None if path is None else Path(path)


def read(file: Path) -> list[PlannedTest]:
    """The plan that a worker has written; empty if the worker could not write it."""
    try:
        return [PlannedTest(**test) for test in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return []
