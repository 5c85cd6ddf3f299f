"""The pytest plugin's hooks and its fixture. What the hooks do is in the files beside this one.

Pytest imports the plugin in every run, so nothing here imports torch before a check needs it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.diagnosis.time_left import progress_shown_by
from ddp_equivalence.pytest_plugin import options
from ddp_equivalence.pytest_plugin.guards import Planting, UnreadVerdicts
from ddp_equivalence.pytest_plugin.results import (
    RecordedLines,
    RunResults,
    attach,
    checks_noted,
    summary_lines,
    write_json,
    write_lines,
)
from ddp_equivalence.report.text import annotation

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

_results = pytest.StashKey[RunResults]()
_settings = pytest.StashKey[settings.Settings]()
_started = pytest.StashKey[bool]()
_not_written = pytest.StashKey[str]()


class Equivalence:
    """``check`` and ``assert_equivalent``, imported when they are first used."""

    @property
    def check(self) -> Callable[..., Verdict]:
        from ddp_equivalence.checking.check import check

        return check

    @property
    def assert_equivalent(self) -> Callable[..., Verdict]:
        from ddp_equivalence.checking.check import assert_equivalent

        return assert_equivalent


@pytest.fixture(scope="session")
def equivalence() -> Equivalence:
    """Compare with one big batch: ``equivalence.assert_equivalent(Case(...), my_step)``."""
    return Equivalence()


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for marker in options.MARKERS:
        config.addinivalue_line("markers", marker)
    options.check_options(config)
    register, run_until = config.pluginmanager.register, None
    if config.getoption("--ddp-run-deadline") is not None:
        deadline = options.RunDeadline(config)
        run_until = deadline.end
        register(deadline)
    config.stash[_settings] = options.settings_of_run(config, run_until)
    config.stash[_results] = RunResults()
    register(config.stash[_results])
    if config.getoption("--ddp-lines") is not None and not hasattr(config, "workerinput"):
        register(RecordedLines(config.getoption("--ddp-lines"), config.getoption("--ddp-lines-of")))
    if config.getoption("--ddp-pairwise") or config.getoption("--ddp-suite-run"):
        # It imports torch, which other people's runs do only when they need it.
        from ddp_equivalence.pytest_plugin import suite_run

        suite_run.register(config, config.stash[_results])
    if (fault := config.getoption("--plant")) is not None:
        register(Planting(fault))
    else:
        # A planted fault has been noticed only by a test that fails because of it.
        register(UnreadVerdicts(config))


USES_THIS_PACKAGE = re.compile(
    rb"\bddp_equivalence\b|\bequivalence\.(check|assert_equivalent)\b",
)
"""Matches in every test file that compares something with one big batch."""


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Start the server of ranks, which is slow, with the first file that will need it."""
    config = parent.config
    runs = not config.getoption("collectonly") and not config.getoption("--ddp-plan")
    if config.stash.get(_started, False) or not runs or file_path.suffix != ".py":
        return
    try:
        uses_this_package = USES_THIS_PACKAGE.search(file_path.read_bytes())
    except OSError:  # pytest will say why the file cannot be read
        return
    if uses_this_package:
        from ddp_equivalence.ranks.server import start_early

        config.stash[_started] = True
        start_early()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        options.check_markers(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    of_test = options.settings_of_test(item, item.config.stash[_settings])
    with settings.using(of_test), checks_noted(item), _progress_on_terminal(item.config):
        return (yield)


def _progress_on_terminal(config: pytest.Config) -> AbstractContextManager[None]:
    """Inside the block, an explanation that takes long tells the terminal, past pytest's capture.

    A worker of xdist has no terminal, and shows nothing.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")

    def show(line: str) -> None:
        if reporter is None:
            return
        if capture is None:  # pytest -p no:capture
            reporter.write_line(line)
            return
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(line)

    return progress_shown_by(show)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    attach(item, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    warm = sys.modules.get("ddp_equivalence.ranks.warm_ranks")
    if warm is not None:
        warm.warm_ranks().stop()
    config = session.config
    results = config.stash[_results]
    if not hasattr(config, "workerinput") and not config.getoption("--ddp-plan"):
        config.stash[_not_written] = why = write_json(config, results)
        lacks = results.lanes_missing(config.getoption("--must-run"))
        nothing = config.getoption("--ddp-require-comparison") and not results.compared
        if session.exitstatus == pytest.ExitCode.OK and (why or lacks or nothing):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("--ddp-plan"):
        return
    results, must_run = config.stash[_results], config.getoption("--must-run")
    if why := config.stash.get(_not_written, ""):
        terminalreporter.line(why, red=True)
    for record in results.records if config.getoption("--ddp-github") else ():
        as_expected = record.confirmed if record.known else record.outcome == record.expected
        if record.report and not as_expected:
            text = annotation(record.file, record.line, record.headline, record.report)
            terminalreporter.line(text)
    if results.is_empty and not must_run and not config.getoption("--ddp-require-comparison"):
        return  # a run that has nothing to do with this package
    terminalreporter.section("compared with one big batch", "=")
    write_lines(terminalreporter, summary_lines(results, must_run))
