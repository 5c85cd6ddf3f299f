"""pytest plugin: options, the fixture, the closing table. Knows nothing of tensors."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.pytest_plugin import summary_table
from ddp_equivalence.pytest_plugin.options import MARKERS, add_options, check_marker, settings_of
from ddp_equivalence.pytest_plugin.summary_table import NotRun
from ddp_equivalence.report import listeners
from ddp_equivalence.report.record import Record, environment, record_of
from ddp_equivalence.report.terminal import width_of

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict

_records = pytest.StashKey[list[Record]]()
_run = pytest.StashKey["Run"]()
_to_export = pytest.StashKey[list[tuple["Request", str]]]()
_until = pytest.StashKey[float | None]()
_started = pytest.StashKey[bool]()
_width = pytest.StashKey[int]()

OURS = re.compile(rb"\bddp_equivalence\b|\bequivalence\.(check|assert_equivalent)\b")
"""Is in the text of a file that will compare something."""

COLLECTIVE = "--ddp-collective-deadline"
RUN_UNTIL = "DDP_EQUIVALENCE_RUN_UNTIL"


class Run:
    """What the process that reports has heard of; under xdist this is the controller."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.not_run: list[NotRun] = []


class Equivalence:
    """The ``equivalence`` fixture: ``check`` and ``assert_equivalent`` under the run's options."""

    @property
    def check(self) -> Callable[..., Verdict]:
        from ddp_equivalence.check_equivalence import check

        return check

    @property
    def assert_equivalent(self) -> Callable[..., Verdict]:
        from ddp_equivalence.check_equivalence import assert_equivalent

        return assert_equivalent


@pytest.fixture(scope="session")
def equivalence() -> Equivalence:
    """Compare with one big batch: ``equivalence.assert_equivalent(Case(...), my_step)``."""
    return Equivalence()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[_run] = Run()
    case, collective = config.getoption("--ddp-deadline"), config.getoption(COLLECTIVE)
    if collective is not None and collective >= case:
        right = f"seconds, below those of a case (--ddp-deadline {case:g})"
        raise pytest.UsageError(f"{COLLECTIVE} {collective:g}: {right}")
    if config.getoption("--in-process") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--in-process: not with -n, whose workers have no terminal")
    config.stash[_until] = _end_of_run(config)
    # pytest puts "E   " before every line of a failure.
    config.stash[_width] = width_of(sys.stdout, settings.Settings.width + 4) - 4
    path: Path | None = config.getoption("--ddp-json")
    if path is not None and not path.resolve().parent.is_dir():
        raise pytest.UsageError(f"--ddp-json {path}: there is no folder {path.resolve().parent}")
    if (fault := config.getoption("--plant")) is not None:
        from ddp_equivalence.pytest_plugin.planting import Planting

        config.pluginmanager.register(Planting(fault), "ddp_equivalence.pytest_plugin.planting")


def _end_of_run(config: pytest.Config) -> float | None:
    """On the machine's monotonic clock; a worker of xdist gets it from the controller."""
    seconds: float | None = config.getoption("--ddp-run-deadline")
    if seconds is None:
        return None
    inherited = os.environ.get(RUN_UNTIL) if hasattr(config, "workerinput") else None
    until = float(inherited) if inherited else time.monotonic() + seconds
    if not hasattr(config, "workerinput"):
        os.environ[RUN_UNTIL] = str(until)
    return until


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Start the ranks' server, which imports torch, while pytest imports the first file of ours."""
    config = parent.config
    if config.stash.get(_started, False) or config.getoption("collectonly"):
        return
    if file_path.suffix == ".py" and _is_ours(file_path):
        from ddp_equivalence.ranks.server import start_early

        config.stash[_started] = True
        start_early()


def _is_ours(path: Path) -> bool:
    try:
        return OURS.search(path.read_bytes()) is not None
    except OSError:  # pytest will say why it cannot be read
        return False


@pytest.hookimpl(tryfirst=True, specname="pytest_runtest_protocol")
def pytest_end_in_time(item: pytest.Item) -> bool | None:
    """Once the run's time is over nothing more runs, and the run has failed."""
    until = item.config.stash[_until]
    if until is None or time.monotonic() <= until:
        return None
    seconds = item.config.getoption("--ddp-run-deadline")
    item.session.shouldfail = f"--ddp-run-deadline: the {seconds:g} s of this run are over"
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Checks made by this test follow the run's options, and are remembered with it."""
    item.stash[_records] = []
    item.stash[_to_export] = []
    listed = item.get_closest_marker("self_check") is None
    planted = item.get_closest_marker("planted_fault")
    expected = "different" if item.get_closest_marker("difference") else "same"

    def remember(verdict: Verdict, request: Request) -> None:
        if listed:
            with_floor = item.config.getoption("--ddp-json") is not None
            record = record_of(verdict, item.nodeid, expected, with_floor)
            record["planted"] = planted.args[0] if planted else ""
            item.stash[_records].append(record)
        wanted = item.config.getoption("--ddp-export-repro") is not None
        if wanted and (verdict.outcome == "different" or verdict.failure is not None):
            headline = str(verdict).partition("\n")[0]
            item.stash[_to_export].append((request, headline))
        for rank, text in sorted(verdict.output.items()):
            if text.strip():  # shown if the test fails, whatever it fails for
                node = verdict.case.ranks.rows[rank].node
                item.add_report_section("call", f"output of rank {rank} (node {node})", text)

    with (
        settings.using(settings_of(item, item.config.stash[_until], item.config.stash[_width])),
        listeners.listening(remember),
    ):
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("ddp"):
            check_marker(item, marker)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send what was compared along with the report: attributes of a report cross xdist."""
    report = yield
    carried: dict[str, Any] = {"records": [], "not_run": None}
    if report.when == "call" or (report.when == "setup" and report.failed):
        carried["records"] = item.stash[_records]
        known = item.get_closest_marker("difference") is not None
        for one in carried["records"]:
            if report.passed and not known:
                one["expected"] = one["outcome"]  # the test has judged it
            one["known"], one["confirmed"] = known, known and report.passed
    if report.failed:
        report.sections += [("reproduction", line) for line in _reproductions(item)]
    trial = item.get_closest_marker("trial")
    if report.skipped and trial is not None:
        what, layout, lane = trial.args
        carried["not_run"] = asdict(NotRun(what, layout, lane, _reason(report)))
    report.__dict__["ddp_equivalence"] = carried
    return report


def _reproductions(item: pytest.Item) -> list[str]:
    """Write a script for every difference that the failing test met; say where each is."""
    to_export, item.stash[_to_export] = item.stash[_to_export], []
    lines = []
    for number, (request, headline) in enumerate(to_export, start=1):
        from ddp_equivalence.report.script import command_of, export_request, file_name

        name = item.nodeid if len(to_export) == 1 else f"{item.nodeid}-{number}"
        folder = item.config.getoption("--ddp-export-repro")
        try:
            path = export_request(request, folder, headline=headline, name=file_name(name))
        except (ValueError, OSError) as error:
            lines.append(f"none: {error}")
        else:
            lines.append(f"{path} ({command_of(path)})")
    return lines


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    carried = getattr(report, "ddp_equivalence", None)
    if not carried or _reporting is None:
        return
    _reporting.records += carried["records"]
    if carried["not_run"]:
        _reporting.not_run.append(NotRun(**carried["not_run"]))


_reporting: Run | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    global _reporting
    _reporting = session.config.stash[_run]


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """End the ranks, write the results, and fail where a lane that had to run did not."""
    warm = sys.modules.get("ddp_equivalence.ranks.warm_ranks")
    if warm is not None:
        warm.warm_ranks().stop()
    config = session.config
    if not hasattr(config, "workerinput"):
        run, must_run = config.stash[_run], config.getoption("--must-run")
        if session.exitstatus == pytest.ExitCode.OK and _nothing_shown(run, config):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path: Path | None = config.getoption("--ddp-json")
        if path is not None:
            _write(path, run, must_run)
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    run, must_run = config.stash[_run], config.getoption("--must-run")
    wanted = must_run or config.getoption("--ddp-require-comparison")
    if not run.records and not run.not_run and not wanted:
        return  # a run that has nothing to do with us
    terminalreporter.section("compared with one big batch", "=")
    for line in summary_table.lines(run.records, run.not_run, must_run):
        bad = any(word in line for word in ("DIFFER", "UNKNOWN", "FAILED", "NOTHING", "MISSED"))
        terminalreporter.line(line, red=bad, yellow="NOT RUN" in line and not bad)


def _nothing_shown(run: Run, config: pytest.Config) -> bool:
    compared = summary_table.compared(run.records)
    if config.getoption("--ddp-require-comparison") and not compared:
        return True
    return bool(list(summary_table.lanes_missing(run.records, config.getoption("--must-run"))))


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _write(path: Path, run: Run, must_run: list[str]) -> None:
    not_run = [
        {"what": f"{one.what} on {one.layout} ({one.lane})", "reason": one.reason}
        for one in run.not_run
    ]
    found = {
        "environment": environment(),
        "cases": run.records,
        "not_run": not_run,
        "summary": summary_table.summary(run.records, run.not_run, must_run),
    }
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
