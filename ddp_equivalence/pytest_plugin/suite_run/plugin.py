"""The hooks of ``ddp-equivalence run``, which are registered for no other run of pytest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.suite_run import handed_over, plan, progress_line, time_needed
from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest
from ddp_equivalence.report.box import box_in_short, box_lines, has_gpus

FIRST_WORKER = "gw0"


def register(config: pytest.Config) -> None:
    """Register what this process of the run needs."""
    if hasattr(config, "workerinput"):
        file = handed_over.file_for(config)
        if file is not None:
            config.pluginmanager.register(handed_over.PlanHandedOver(file))
        return
    line = None
    if progress_line.can_show(config) and not config.getoption("--ddp-plan"):
        line = progress_line.ProgressLine(config)
        config.pluginmanager.register(line, progress_line.NAME)
    config.pluginmanager.register(SuiteRun(config, line), NAME)


NAME = "ddp_equivalence_suite_run"


class SuiteRun:
    """Registered in the process that has the terminal. ``tests``: all that pytest collected."""

    def __init__(self, config: pytest.Config, line: progress_line.ProgressLine | None) -> None:
        self._config, self._line = config, line
        self._handed_over = Path(tempfile.mkdtemp(prefix="ddp_equivalence-")) / "plan.json"
        self._timings = time_needed.last_timings(config)
        self._stopwatch = time_needed.Stopwatch()
        self.tests: list[PlannedTest] = []

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        return list(self._began(plan.planned(items)))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if node.gateway.id == FIRST_WORKER:
            node.workerinput[handed_over.FILE] = str(self._handed_over)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        if node.gateway.id == FIRST_WORKER and not self.tests:
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            for line in self._began(handed_over.read(self._handed_over)):
                reporter.write_line(line)
