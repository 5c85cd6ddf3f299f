"""The pytest plugin's hooks. What they do is in the files beside this one.

Pytest imports the plugin in every run, so nothing here imports torch before a check needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.pytest_plugin import on_terminal, options, ranks_of_run
from ddp_equivalence.pytest_plugin.guards import Planting, UnreadVerdicts
from ddp_equivalence.pytest_plugin.options import MARKERS, RunDeadline, check_markers
from ddp_equivalence.pytest_plugin.ranks_of_run import Equivalence, equivalence
from ddp_equivalence.pytest_plugin.results import (
    RunResults,
    attach,
    checks_recorded,
    export,
    not_run_of,
    of_expected_failure,
    records_of,
    requests_kept,
    say_if_not_written,
    spent,
    written,
)
from ddp_equivalence.pytest_plugin.suite_run import SELECTION, SUITE_RUN
from ddp_equivalence.report.text import Line, Style

__all__ = ["Equivalence", "equivalence"]  # the fixture, which pytest finds here, and its type

_results = pytest.StashKey[RunResults]()
_settings = pytest.StashKey[settings.Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    options.check_options(config)
    run_until = None
    if config.getoption("--ddp-run-deadline") is not None:
        deadline = RunDeadline(config)
        run_until = deadline.end
        config.pluginmanager.register(deadline)
    config.stash[_settings] = options.settings_of_run(config, run_until)
    config.stash[_results] = RunResults()
    config.pluginmanager.register(config.stash[_results])
    if config.getoption("--ddp-lines") is not None and not hasattr(config, "workerinput"):
        from ddp_equivalence.pytest_plugin.recorded_lines import RecordedLines

        lines, of = config.getoption("--ddp-lines"), config.getoption("--ddp-lines-of")
        config.pluginmanager.register(RecordedLines(lines, of))
    if config.getoption("--ddp-pairwise"):
        from ddp_equivalence.pytest_plugin.suite_run.plan import PairwiseSelection

        config.pluginmanager.register(PairwiseSelection(config), SELECTION)
    if config.getoption("--ddp-suite-run"):
        # It imports torch, which other people's runs do only when they need it.
        from ddp_equivalence.pytest_plugin.suite_run import plugin

        plugin.register(config, config.stash[_results])
    if (fault := config.getoption("--plant")) is not None:
        config.pluginmanager.register(Planting(fault))
    else:
        # A planted fault has been noticed only by a test that fails because of it.
        config.pluginmanager.register(UnreadVerdicts(config))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    ranks_of_run.start_for(file_path, parent.config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        check_markers(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with (
        settings.using(options.settings_of_test(item, item.config.stash[_settings])),
        checks_recorded(item),
        requests_kept(item),
        on_terminal.added_to_report(item),
        on_terminal.shown_on_the_terminal(item.config),
    ):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    records, not_run = records_of(item, report), not_run_of(item, report)
    expected_failure = of_expected_failure(item, report)
    attach(report, records, expected_failure, not_run, spent())
    if report.failed:
        lines = export(item)
        report.sections += [("reproduction", line) for line in lines]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    warm = sys.modules.get("ddp_equivalence.ranks.warm_ranks")
    if warm is not None:
        warm.warm_ranks().stop()
    config = session.config
    results = config.stash[_results]
    if not hasattr(config, "workerinput") and not config.getoption("--ddp-plan"):
        if session.exitstatus == pytest.ExitCode.OK and _has_not_shown_enough(results, config):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if not written(config, results) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("--ddp-plan"):
        return
    results, must_run = config.stash[_results], config.getoption("--must-run")
    say_if_not_written(config, terminalreporter)
    if config.getoption("--ddp-github"):
        on_terminal.write_annotations(terminalreporter, results)
    if results.is_empty and not must_run and not config.getoption("--ddp-require-comparison"):
        return  # a run that has nothing to do with this package
    terminalreporter.section("compared with one big batch", "=")
    on_terminal.write(terminalreporter, results, must_run)
    selection = config.pluginmanager.get_plugin(SELECTION)
    if selection is not None:
        on_terminal.write_lines(terminalreporter, selection.after)
    if text := ranks_of_run.too_many(config, results.records):
        on_terminal.write_lines(terminalreporter, [Line(text, Style.UNCERTAIN)])
    suite_run = config.pluginmanager.get_plugin(SUITE_RUN)
    if suite_run is not None:
        on_terminal.write_lines(terminalreporter, suite_run.after)


def _has_not_shown_enough(results: RunResults, config: pytest.Config) -> bool:
    """True if a required lane did not run, or if nothing was compared although that is required."""
    if config.getoption("--ddp-require-comparison") and not results.compared:
        return True
    return bool(results.lanes_missing(config.getoption("--must-run")))
