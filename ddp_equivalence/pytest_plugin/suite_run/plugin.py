"""The hooks of ddp-equivalence run: its progress, its page, and the processes on its GPUs."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin import on_terminal, ranks_of_run
from ddp_equivalence.pytest_plugin.results import RunResults
from ddp_equivalence.pytest_plugin.suite_run import SUITE_RUN, gpus_used, plan
from ddp_equivalence.pytest_plugin.suite_run.plan import (
    FILE,
    PlanHandedOver,
    PlannedTest,
    Selected,
    Timings,
    duration_text,
    file_for,
    read,
    seconds_of,
    selected,
)
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
from ddp_equivalence.ranks.gpu_room import gpu_room
from ddp_equivalence.ranks.gpus import BYTES_PER_PROCESS, visible_gpus
from ddp_equivalence.ranks.lanes import cuda_devices
from ddp_equivalence.ranks.nccl import transport
from ddp_equivalence.report.machine import Box, box_in_short, box_lines, this_box, title
from ddp_equivalence.report.text import Line, Style, plural

# The hooks of ``ddp-equivalence run``, which are registered for no other run of pytest.

FIRST_WORKER = "gw0"

NOT_PASSED = ("failed", "error")
"""The names under which pytest keeps the reports of tests that make a run fail."""


def register(config: pytest.Config, results: RunResults) -> None:
    """Register what this process of the run needs. ``results``: filled while tests run."""
    if hasattr(config, "workerinput"):
        file = file_for(config)
        if file is not None:
            config.pluginmanager.register(PlanHandedOver(file))
        return
    line = None
    fewer_workers = ranks_of_run.fewer(config, len(cuda_devices()))
    if config.getoption("--ddp-plan"):
        config.option.dist = "no"  # xdist starts no workers, which would run the tests
    elif can_show(config):
        line = ProgressLine(config)
        config.pluginmanager.register(line, on_terminal.PROGRESS_LINE)
    config.pluginmanager.register(SuiteRun(config, results, line, fewer_workers), SUITE_RUN)


class SuiteRun:
    """Registered in the process that has the terminal. ``after``: what ends the closing table."""

    def __init__(
        self,
        config: pytest.Config,
        results: RunResults,
        line: ProgressLine | None,
        fewer_workers: str,
    ) -> None:
        self._config, self._results, self._line = config, results, line
        self._fewer_workers = fewer_workers
        self._folder = tempfile.TemporaryDirectory(prefix="ddp_equivalence-")
        self._timings = plan.last_timings(config)
        self._stopwatch = plan.Stopwatch()
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
            node.workerinput[FILE] = str(self._file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        if node.gateway.id == FIRST_WORKER:
            self._to_print = list(self._before(*read(self._file)))

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
        plan.keep_timings(self._config, self._stopwatch.timings(self._workers))
        box = this_box()
        self.after = list(self._gpu_lines(box, session))
        folder: Path | None = self._config.getoption("--ddp-record")
        if folder is None:
            return
        try:
            path = write(folder, box, self._ran(box, int(session.exitstatus)))
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
        self._stopwatch.kinds = {test.id: plan.kind_of(test) for test in tests}
        if self._line is not None:
            self._line.pace = Pace(tests, self._timings, self._workers)
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
                yield from process_lines()
        else:
            yield box_in_short(box)
            yield plan.plan_in_short(tests)
            if counts is not None:
                yield f"Tests: {counts.text}"
        yield plan.estimate_text(tests, self._timings, self._workers)

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

    def _ran(self, box: Box, exit_code: int) -> Ran:
        """What the page says of this run."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        stats: dict[str, list[Any]] = {} if reporter is None else reporter.stats
        words = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        must_run = self._config.getoption("--must-run")
        table = [*on_terminal.summary_lines(self._results, must_run), *self.after]
        return Ran(
            date=time.strftime("%Y-%m-%d", time.localtime(self._began)),
            seconds=time.time() - self._began,
            workers=self._workers,
            exit_code=exit_code,
            counts={word: len(stats[word]) for word in words if stats.get(word)},
            plan=list(self._plan_lines()),
            table=[line.text for line in table],
            failed=[report.nodeid for word in NOT_PASSED for report in stats.get(word, ())],
        )


# ``ddp-equivalence run --record``: the machine, the plan and the results as one Markdown page.
#
# Pages are published, so a page holds no name of a host or of a user, no path, and no UUID of a
# GPU.

PATH = re.compile(r"(?<![\w.:/])~?/(?:[\w.+@~-]+/)*[\w.+@~-]+/?")
UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}")

SAID_OF_ALL = ("", "root", "localhost")
"""Such names tell nothing of a machine. "root cause" is a part of reports."""

LONGEST_LIST = 50
"""So many failed tests are listed."""


@dataclass(frozen=True)
class Ran:
    """What the page says of a run beside its machine.

    ``counts``: "passed", "failed", ... -> number of tests. ``failed``: the ids of those that did
    not pass. ``date``: the day on which it began, as in 2026-11-22.
    """

    date: str
    seconds: float
    workers: int
    exit_code: int
    counts: Mapping[str, int]
    plan: Sequence[str]
    table: Sequence[str]
    failed: Sequence[str]


def write(folder: Path, box: Box, ran: Ran) -> Path:
    """Write the page into the folder and return its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(page_lines(box, ran)) + "\n"
    name = f"{ran.date}-{_name_of(box)}"
    number = 1
    while True:
        path = folder / (f"{name}.md" if number == 1 else f"{name}-{number}.md")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:  # another run of the same day
            number += 1


def page_lines(box: Box, ran: Ran) -> Iterator[str]:
    """The page, line by line."""
    machine = list(box_lines(box, with_uuids=False))
    yield f"# {ran.date}: {without_private(title(box))}"
    yield ""
    yield "This page was written by `ddp-equivalence run --record`. To compare it with another"
    yield "machine, run the same command there, and read the two pages side by side."
    yield ""
    counts = ", ".join(f"{count} {word}" for word, count in ran.counts.items())
    yield f"The run took {ran.seconds:.0f} s with {_workers(ran.workers)}: {counts}."
    yield f"Its exit code is {ran.exit_code}."
    blocks = {"The machine": machine, "The plan": ran.plan, "Results": ran.table}
    for heading, lines in blocks.items():
        yield ""
        yield f"## {heading}"
        yield ""
        yield "```"
        yield from map(without_private, lines)
        yield "```"
    if ran.failed:
        yield ""
        yield "## Tests that did not pass"
        yield ""
        yield "```"
        yield from map(without_private, ran.failed[:LONGEST_LIST])
        if len(ran.failed) > LONGEST_LIST:
            yield f"... and {len(ran.failed) - LONGEST_LIST} more"
        yield "```"


def without_private(text: str) -> str:
    """The text without paths, UUIDs of GPUs, and the names of this host and this user."""
    text = UUID.sub("(UUID)", PATH.sub("(path)", text))
    for name, instead in _private_names().items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _private_names() -> dict[str, str]:
    """Name of this host or user -> what stands for it."""
    names = {socket.gethostname(): "(host)"}
    with suppress(OSError, KeyError, ImportError):  # the user may have no name
        names[getpass.getuser()] = "(user)"
    return {name: instead for name, instead in names.items() if name not in SAID_OF_ALL}


def _workers(workers: int) -> str:
    return "one pytest worker" if workers == 1 else f"{workers} pytest workers"


def _name_of(box: Box) -> str:
    """The machine as a part of a file's name, such as ``4-x-nvidia-a100``, or ``cpu``."""
    if not box.has_gpus:
        return "cpu"
    gpus, _, _ = without_private(title(box)).rpartition(", ")
    return re.sub(r"[^a-z0-9]+", "-", gpus.lower()).strip("-")


# A line below pytest's own output that says how far the run is. It is shown on a terminal only.
#
# It stands one row below the row that pytest writes to. It is erased before pytest writes
# anything, so that nothing of it remains between pytest's lines. It moves the cursor by control
# sequences of ECMA-48, which every terminal has that calls itself other than "dumb".

ERASE_ROW, UP = "\033[2K", "\033[A"

LEAST_SECONDS = 10.0
"""After so many seconds the time that is left follows from the pace of this run."""


def can_show(config: pytest.Config) -> bool:
    """True if the output of this run has room for the line.

    It has none if it is no terminal, if the user asked for less (``-q``), or if the output of the
    tests stands between pytest's lines (``-s``, live logs).
    """
    return (
        sys.stdout.isatty()
        and not config.pluginmanager.is_blocked("terminalreporter")
        and os.environ.get("TERM", "dumb") != "dumb"
        and config.option.verbose >= 0
        and config.getoption("capture") != "no"
        and not (config.getoption("log_cli_level") or config.getini("log_cli"))
    )


class Pace:
    """Counts tests, and says how much time is left."""

    def __init__(self, tests: Sequence[PlannedTest], timings: Timings, workers: int) -> None:
        self._lanes = {test.id: test.lane for test in tests}
        self._expected = {test.id: seconds_of(test, timings) for test in tests}
        self._all = sum(self._expected.values())
        self._workers = workers
        self._began = time.monotonic()
        self._done: set[str] = set()
        self._seconds_done = 0.0

    def finished(self, test_id: str) -> None:
        if test_id not in self._done:
            self._done.add(test_id)
            self._seconds_done += self._expected.get(test_id, 0.0)

    def text(self, test_id: str) -> str:
        """How far the run is while this test runs."""
        parts = [f"{len(self._done)} of {len(self._lanes)} tests"]
        if lane := self._lanes.get(test_id):
            parts.append(f"lane {lane}")
        if self._done:
            parts.append(f"about {duration_text(self._seconds_left())} left")
        return ", ".join(parts)

    def _seconds_left(self) -> float:
        left = max(0.0, self._all - self._seconds_done)
        spent = time.monotonic() - self._began
        if spent < LEAST_SECONDS or not self._seconds_done:
            return left / self._workers
        return left * spent / self._seconds_done


class ProgressLine:
    """Registered as a plugin: keeps the line up to date. ``pace`` is set once tests are known."""

    def __init__(self, config: pytest.Config) -> None:
        self.pace: Pace | None = None
        self._config = config
        self._stream = sys.stdout  # what pytest writes to; it replaces sys.stdout later
        self._shown = ""
        self._is_drawn = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logstart(self, nodeid: str) -> Generator[None, object, object]:
        with self.hidden():
            result = yield
            if self.pace is not None:
                self._shown = self.pace.text(nodeid)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self) -> Generator[None, object, object]:
        with self.hidden():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> Generator[None, object, object]:
        if self.pace is not None:
            self.pace.finished(nodeid)
        with self.hidden():
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        self.end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        self.end()

    def end(self) -> None:
        """Erase the line and show it no more."""
        self._erase()
        self._shown = ""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside the block the line is gone, and others may write."""
        self._erase()
        try:
            yield
        finally:
            self._draw()

    def _draw(self) -> None:
        if self._shown and not self._is_drawn:
            # A longer line would take two rows.
            text = self._shown[: self._config.get_terminal_writer().fullwidth - 1]
            self._write_below(f"{ERASE_ROW}{text}")
            self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._write_below(ERASE_ROW)
            self._is_drawn = False

    def _write_below(self, text: str) -> None:
        """Write to the row below and return to where pytest goes on writing."""
        writer = self._config.get_terminal_writer()
        column = writer.width_of_current_line % writer.fullwidth + 1
        self._stream.write(f"\n{text}{UP}\033[{column}G")
        self._stream.flush()


# How many processes a run may have on each GPU at once, and about how much memory they hold.


def process_lines() -> Iterator[str]:
    """A line for the GPUs that share a limit; none without GPUs."""
    room = gpu_room()
    most_on = {device: room.most_on(device) for device in cuda_devices()}
    for most in sorted(set(most_on.values())):
        which = [device for device, limit in most_on.items() if limit == most]
        devices = f"CUDA {plural(len(which), 'device')} {', '.join(which)}"
        where = "each GPU" if len(which) == len(most_on) else devices
        mode = ", as its compute mode demands" if room.is_exclusive(which[0]) else ""
        yield (
            f"Processes: at most {most} at once on {where}{mode}; idle ones end when others need "
            "their place"
        )
    if most_on:
        mebibytes = BYTES_PER_PROCESS // 2**20
        yield (
            f"  An idle process holds about {mebibytes} MiB of its GPU's memory "
            "(an estimate; it was not measured)"
        )
