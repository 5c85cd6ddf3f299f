"""The hooks of ``ddp-equivalence run``, which are registered for no other run of pytest."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin import progress, summary_table, workers
from ddp_equivalence.pytest_plugin.run_results import RunResults
from ddp_equivalence.pytest_plugin.suite_run import (
    SUITE_RUN,
    gpu_processes,
    gpus_used,
    handed_over,
    page,
    plan,
    progress_line,
    time_needed,
)
from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest
from ddp_equivalence.pytest_plugin.suite_run.selection import Selected, selected
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
from ddp_equivalence.ranks.gpus import visible_gpus
from ddp_equivalence.ranks.lanes import cuda_devices
from ddp_equivalence.ranks.nccl_transport import transport
from ddp_equivalence.report.box import Box, box_in_short, box_lines, this_box
from ddp_equivalence.report.line import Line, Style

FIRST_WORKER = "gw0"

NOT_PASSED = ("failed", "error")
"""The names under which pytest keeps the reports of tests that make a run fail."""


def register(config: pytest.Config, results: RunResults) -> None:
    """Register what this process of the run needs. ``results``: filled while tests run."""
    if hasattr(config, "workerinput"):
        file = handed_over.file_for(config)
        if file is not None:
            config.pluginmanager.register(handed_over.PlanHandedOver(file))
        return
    line = None
    fewer_workers = workers.fewer(config, len(cuda_devices()))
    if config.getoption("--ddp-plan"):
        config.option.dist = "no"  # xdist starts no workers, which would run the tests
    elif progress_line.can_show(config):
        line = progress_line.ProgressLine(config)
        config.pluginmanager.register(line, progress.PROGRESS_LINE)
    config.pluginmanager.register(SuiteRun(config, results, line, fewer_workers), SUITE_RUN)


class SuiteRun:
    """Registered in the process that has the terminal. ``after``: what ends the closing table."""

    def __init__(
        self,
        config: pytest.Config,
        results: RunResults,
        line: progress_line.ProgressLine | None,
        fewer_workers: str,
    ) -> None:
        self._config, self._results, self._line = config, results, line
        self._fewer_workers = fewer_workers
        self._folder = tempfile.TemporaryDirectory(prefix="ddp_equivalence-")
        self._timings = time_needed.last_timings(config)
        self._stopwatch = time_needed.Stopwatch()
        self._began = time.time()
        self._tests: list[PlannedTest] = []
        self._selected: Selected | None = None
        self._to_print: list[str] = []
        self.after: list[Line] = []

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        return list(self._before(plan.planned(items), selected(self._config)))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if node.gateway.id == FIRST_WORKER:
            node.workerinput[handed_over.FILE] = str(self._file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        if node.gateway.id == FIRST_WORKER:
            self._to_print = list(self._before(*handed_over.read(self._file)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Under xdist, print what stands before the first test when xdist has printed its own."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        while self._to_print and reporter is not None:
            reporter.write_line(self._to_print.pop(0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """With ``--ddp-plan`` nothing runs; but pytest itself stops the run on a broken file."""
        return True if self._config.getoption("--ddp-plan") and not session.testsfailed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._stopwatch.add(report)

    @pytest.hookimpl(trylast=True)  # when the workers of xdist have left the GPUs
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._folder.cleanup()
        if self._config.getoption("--ddp-plan"):
            return
        time_needed.keep_timings(self._config, self._stopwatch.timings(self._workers))
        box = this_box()
        self.after = list(self._gpu_lines(box, session))
        folder: Path | None = self._config.getoption("--ddp-record")
        if folder is None:
            return
        try:
            path = page.write(folder, box, self._ran(box, int(session.exitstatus)))
        except OSError as error:
            text = f"--record {folder}: FAILED, the page could not be written: {error.strerror}"
            self.after.append(Line(text, Style.BAD))
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            self.after.append(Line(f"This run is recorded in {path}"))

    @property
    def _file(self) -> Path:
        return Path(self._folder.name) / "plan.json"

    @property
    def _workers(self) -> int:
        return self._config.getoption("numprocesses", None) or 1

    def _before(self, tests: list[PlannedTest], counts: Selected | None) -> Iterator[str]:
        """What is printed before the first test."""
        self._tests, self._selected = tests, counts
        self._stopwatch.kinds = {test.id: time_needed.kind_of(test) for test in tests}
        if self._line is not None:
            self._line.pace = progress_line.Pace(tests, self._timings, self._workers)
        if self._fewer_workers:
            yield self._fewer_workers
        whole_plan = self._config.getoption("--ddp-plan")
        if not whole_plan and (self._config.option.verbose < 0 or not tests):
            return
        box = this_box()
        if box.has_gpus or whole_plan:
            yield from box_lines(box)
            yield from self._plan_lines()
            if box.devices and any(not test.reason for test in tests):
                yield from gpu_processes.process_lines()
        else:
            yield box_in_short(box)
            yield plan.plan_in_short(tests)
            if counts is not None:
                yield f"Tests: {counts.text}"
        yield time_needed.estimate_text(tests, self._timings, self._workers)

    def _plan_lines(self) -> Iterator[str]:
        yield from plan.plan_lines(self._tests)
        if self._selected is not None:
            yield f"Tests: {self._selected.text}"

    def _gpu_lines(self, box: Box, session: pytest.Session) -> Iterator[Line]:
        """Which GPUs were used, and how NCCL sent data between them."""
        records = self._results.records
        visible = visible_gpus(box.gpus.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        yield from gpus_used.gpu_lines(records, visible, box.devices)
        was_cut_short = session.shouldstop or session.shouldfail
        if session.exitstatus == pytest.ExitCode.INTERRUPTED or was_cut_short:
            return  # its user does not want to wait for the probe
        for backend in NCCL_BACKENDS:
            ranks = gpus_used.most_ranks(records, backend)
            if ranks > 1:
                yield gpus_used.transport_line(transport(ranks, backend), ranks)

    def _ran(self, box: Box, exit_code: int) -> page.Ran:
        """What the page says of this run."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        stats: dict[str, list[Any]] = {} if reporter is None else reporter.stats
        words = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        must_run = self._config.getoption("--must-run")
        table = [*summary_table.summary_lines(self._results, must_run), *self.after]
        return page.Ran(
            date=time.strftime("%Y-%m-%d", time.localtime(self._began)),
            seconds=time.time() - self._began,
            workers=self._workers,
            exit_code=exit_code,
            counts={word: len(stats[word]) for word in words if stats.get(word)},
            plan=list(self._plan_lines()),
            table=[line.text for line in table],
            failed=[report.nodeid for word in NOT_PASSED for report in stats.get(word, ())],
        )
