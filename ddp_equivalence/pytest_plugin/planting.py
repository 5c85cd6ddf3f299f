"""``pytest --plant NAME``: every test runs with a fault planted; which of them notice?"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.report import listeners

if TYPE_CHECKING:
    from ddp_equivalence.faults.plant import PlantedFault
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict

MOST_LISTED = 20

_fired = pytest.StashKey[int]()


@dataclass(frozen=True)
class Noticed:
    """One test under the fault: ``fired`` counts what it did in the test's process and ranks."""

    test: str
    failed: bool
    fired: int


class Planting:
    """Registered for a run with ``--plant``. Raises UsageError for a fault that is not known."""

    def __init__(self, name: str) -> None:
        from ddp_equivalence.faults.plant import fault_named

        try:
            self._fault = fault_named(name)
        except BadCase as error:
            raise pytest.UsageError(f"--plant {name}: {error}") from error
        self._found: list[Noticed] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Only the test itself is broken: what its fixtures make is made before."""
        from ddp_equivalence.faults.plant import planted

        on_ranks: list[int] = []

        def remember(verdict: Verdict, request: Request) -> None:
            on_ranks.extend(one.planted or 0 for one in verdict.evidence.values())

        here: PlantedFault | None = None
        try:
            with planted(self._fault.name) as here, listeners.listening(remember):
                return (yield)
        finally:
            item.stash[_fired] = sum(on_ranks) + (here.fired if here else 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attributes of a report cross xdist."""
        report = yield
        if report.when == "call" and not report.skipped:
            report.__dict__["ddp_planted"] = item.stash.get(_fired, 0)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        fired = getattr(report, "ddp_planted", None)
        if fired is not None:
            self._found.append(Noticed(report.nodeid, report.failed, fired))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"planted: {self._fault.name}", "=")
        terminalreporter.line(self._fault.sentence)
        noticed = [one for one in self._found if one.failed and one.fired]
        missed = [one for one in self._found if not one.failed and one.fired]
        apart = [one for one in self._found if not one.fired]
        terminalreporter.line(f"noticed by {len(noticed)} tests, which failed")
        terminalreporter.line(
            f"NOT NOTICED by {len(missed)} tests in which it fired, and which passed",
            red=bool(missed),
        )
        for one in missed[:MOST_LISTED]:
            terminalreporter.line(f"    {one.test}")
        if len(missed) > MOST_LISTED:
            terminalreporter.line(f"    ... and {len(missed) - MOST_LISTED} more")
        if apart:
            failed = sum(one.failed for one in apart)
            also = f" ({failed} of them failed for another reason)" if failed else ""
            terminalreporter.line(f"never fired in {len(apart)} tests{also}")
