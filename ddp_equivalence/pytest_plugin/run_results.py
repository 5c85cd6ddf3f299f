"""The results of a run: every check, and every trial that did not run.

Under xdist the workers attach results to pytest's reports, and the controller collects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pytest

from ddp_equivalence.report.record import Record

ATTRIBUTE = "ddp_equivalence"
"""Attribute of a report. Xdist carries attributes that are plain data."""


@dataclass(frozen=True)
class NotRun:
    """A trial of the catalogue that did not run, and why."""

    strategy: str
    layout: str
    lane: str
    reason: str


@dataclass(frozen=True)
class Spent:
    """What a process has spent by now. ``starts``: how many sets of ranks it has started.
    ``cpu_seconds``: processor time of their work.
    """

    starts: int
    cpu_seconds: float


def attach(
    report: pytest.TestReport,
    records: Sequence[Record],
    of_expected_failure: Sequence[Record],
    not_run: NotRun | None,
    spent: Spent,
) -> None:
    """Send the results of one test along with its report. ``spent``: by its process, by now."""
    report.__dict__[ATTRIBUTE] = {
        "records": [asdict(record) for record in records],
        "of_expected_failure": [asdict(record) for record in of_expected_failure],
        "not_run": None if not_run is None else asdict(not_run),
        "spent": asdict(spent),
    }


class RunResults:
    """Registered as a plugin: collects what is attached to the reports of all tests."""

    def __init__(
        self, records: Sequence[Record] = (), trials_not_run: Sequence[NotRun] = ()
    ) -> None:
        self.records, self.trials_not_run = list(records), list(trials_not_run)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        attached = getattr(report, ATTRIBUTE, None)
        if attached is None:
            return
        self.records += [Record(**record) for record in attached["records"]]
        if attached["not_run"] is not None:
            self.trials_not_run.append(NotRun(**attached["not_run"]))

    @property
    def is_empty(self) -> bool:
        return not self.records and not self.trials_not_run

    @property
    def planted(self) -> Sequence[Record]:
        """The checks of steps that were broken on purpose."""
        return [record for record in self.records if record.planted]

    @property
    def not_planted(self) -> Sequence[Record]:
        """All other checks."""
        return [record for record in self.records if not record.planted]

    @property
    def compared(self) -> Sequence[Record]:
        """The checks that reached a verdict, without those that were broken on purpose."""
        return [record for record in self.records if record.was_compared]

    def lanes_missing(self, must_run: Sequence[str]) -> Sequence[str]:
        """The lanes that had to run and on which nothing was compared."""
        lanes = {record.backend for record in self.compared}
        return [lane for lane in must_run if lane not in lanes]
