"""Adds every test and every check of a run to a record, as soon as the test has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.gate.record import RecordWriter
from ddp_equivalence.pytest_plugin.results import ATTRIBUTE, Spent

LONGEST_REASON = 300
NOTHING = Spent(0, 0.0)

OF_CHECKS = (
    *("strategy", "layout", "backend", "dtype", "expected", "outcome", "cause", "causes"),
    *("error", "floor", "limit", "seconds", "reason", "parameters", "elements", "ranks"),
    *("planted", "known", "gpu", "digests", "details"),
)
"""The fields of a check that a record has."""


class RecordedLines:
    """``path``: of the record. ``of``: stands before the names of the tests, such as "suite:"."""

    def __init__(self, path: Path, of: str) -> None:
        self._writer = RecordWriter(path)
        self._of = of
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._has_collected = False
        self._spent: dict[str, Spent] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist, whose workers collect."""
        if session.items:
            self._collected(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """All workers collect the same tests."""
        self._collected(len(ids))

    def _collected(self, tests: int) -> None:
        if not self._has_collected:
            self._has_collected = True
            self._writer.write("collected", tests=tests)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what is known when a test has ended, or its worker has crashed."""
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when not in ("setup", "call"):
            self._write(report.nodeid, self._reports.pop(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected is a test that fails."""
        if report.failed:
            reason = _first_line(report.longreprtext)
            self._test(report.nodeid, outcome="failed", seconds=0.0, reason=reason)

    def _write(self, nodeid: str, reports: list[pytest.TestReport]) -> None:
        outcomes = {report.outcome for report in reports}
        outcome = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
        reasons = [_reason(report) for report in reports if report.outcome == outcome != "passed"]
        if outcome == "skipped" and any(hasattr(report, "wasxfail") for report in reports):
            outcome = "xfailed"
        seconds = round(sum(report.duration for report in reports), 4)
        facts = {"outcome": outcome, "seconds": seconds, "reason": "; ".join(reasons)}
        self._test(nodeid, **facts, **self._spent_in(reports))
        number = 0
        for report in reports:
            attached = getattr(report, ATTRIBUTE, {})
            for record in (*attached.get("records", ()), *attached.get("of_expected_failure", ())):
                fields = {name: record[name] for name in OF_CHECKS}
                self._writer.write("check", test=f"{self._of}{nodeid}", number=number, **fields)
                number += 1

    def _spent_in(self, reports: Sequence[pytest.TestReport]) -> dict[str, Any]:
        """What the test has spent, in its process."""
        worker = getattr(reports[-1], "worker_id", "")
        attached = [getattr(report, ATTRIBUTE, {}).get("spent") for report in reports]
        now = max((Spent(**one) for one in attached if one), key=astuple, default=NOTHING)
        before, self._spent[worker] = self._spent.get(worker, NOTHING), now
        cpu_seconds = max(0.0, now.cpu_seconds - before.cpu_seconds)
        starts = max(0, now.starts - before.starts)
        return {"starts": starts, "cpu_seconds": round(cpu_seconds, 4)}

    def _test(self, nodeid: str, **fields: Any) -> None:
        self._writer.write("test", id=f"{self._of}{nodeid}", **fields)


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # it was skipped
        return _first_line(report.longrepr[2].removeprefix("Skipped: "))
    crash = getattr(report.longrepr, "reprcrash", None)
    return _first_line(str(report.longrepr) if crash is None else crash.message)


def _first_line(text: str) -> str:
    return " ".join(text.strip().partition("\n")[0].split())[:LONGEST_REASON]
