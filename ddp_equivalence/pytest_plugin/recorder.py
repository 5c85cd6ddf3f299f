"""Record every check that a test makes, and every trial of the catalogue that did not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.pytest_plugin.run_results import NotRun, Spent
from ddp_equivalence.report import listeners
from ddp_equivalence.report.record import Record, record_of

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict

_records = pytest.StashKey[list[Record]]()


@contextmanager
def checks_recorded(item: pytest.Item) -> Iterator[None]:
    """Record the checks made inside the block, unless the test is a ``self_check``."""
    item.stash[_records] = []
    if item.get_closest_marker("self_check") is not None:
        yield
        return
    planted = item.get_closest_marker("planted_fault")
    expected = "different" if _is_known_to_differ(item) else "same"
    to_json = item.config.getoption("--ddp-json") is not None
    with_report = to_json or item.config.getoption("--ddp-github")

    recorded = item.config.getoption("--ddp-lines") is not None
    with_floor = to_json or recorded

    def record(verdict: Verdict, request: Request | None) -> None:
        fault = planted.args[0] if planted else ""
        made = record_of(verdict, item.nodeid, expected, fault, with_floor, with_report, recorded)
        if made.report and not made.file:  # nothing of it is the user's code but the test
            file, line, _ = item.location
            made = replace(made, file=str(item.config.rootpath / file), line=(line or 0) + 1)
        item.stash[_records].append(made)

    with listeners.listening(record):
        yield


def records(item: pytest.Item, report: pytest.TestReport) -> Sequence[Record]:
    """The checks of the test that this report is about, with the outcomes that the test expected.

    A test that passed has judged its checks itself, so it expected the outcomes that they have. A
    test that was skipped has judged nothing.
    """
    if report.skipped or (report.when != "call" and not (report.when == "setup" and report.failed)):
        return ()
    made = item.stash[_records]
    if _is_known_to_differ(item):
        return [replace(record, known=True, confirmed=report.passed) for record in made]
    if report.passed:
        return [replace(record, expected=record.outcome) for record in made]
    return made


def of_expected_failure(item: pytest.Item, report: pytest.TestReport) -> Sequence[Record]:
    """The checks of a test that is marked to fail (xfail) and does: tables do not count them."""
    if report.when != "call" or not report.skipped or not hasattr(report, "wasxfail"):
        return ()
    made: list[Record] = item.stash[_records]
    return made


def not_run(item: pytest.Item, report: pytest.TestReport) -> NotRun | None:
    """The test's trial of the catalogue, if this report says that it was skipped."""
    trial = item.get_closest_marker("trial")
    if trial is None or not report.skipped:
        return None
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    strategy, layout, lane = trial.args
    return NotRun(strategy, layout, lane, reason.removeprefix("Skipped: "))


def spent() -> Spent:
    """What the ranks of this process have spent by now; nothing is imported for that."""
    rank_set = sys.modules.get("ddp_equivalence.ranks.rank_set")
    return Spent(0, 0.0) if rank_set is None else Spent(*astuple(rank_set.SPENT))


def _is_known_to_differ(item: pytest.Item) -> bool:
    return item.get_closest_marker("difference") is not None
