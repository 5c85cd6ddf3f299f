"""``pytest --plant NAME``: plants a fault in every test, and lists the tests that do not notice."""

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

ATTRIBUTE = "ddp_planted"
"""Attribute of a report: how often the fault fired. Xdist carries attributes."""

_fired = pytest.StashKey[int]()


@dataclass(frozen=True)
class PlantedTest:
    """One test. ``fired``: how often the fault did its damage, in the test and on its ranks."""

    name: str
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
        self._tests: list[PlantedTest] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Plant the fault in the test itself. Its fixtures have run before, without the fault."""
        from ddp_equivalence.faults.plant import planted

        fired_on_ranks: list[int] = []

        def count(verdict: Verdict, request: Request | None) -> None:
            fired_on_ranks.extend(one.planted or 0 for one in verdict.evidence.values())

        here: PlantedFault | None = None
        try:
            with planted(self._fault.name) as here, listeners.listening(count):
                return (yield)
        finally:
            item.stash[_fired] = sum(fired_on_ranks) + (here.fired if here else 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" and not report.skipped:
            report.__dict__[ATTRIBUTE] = item.stash.get(_fired, 0)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        fired = getattr(report, ATTRIBUTE, None)
        if fired is not None:
            self._tests.append(PlantedTest(report.nodeid, report.failed, fired))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        noticed = [test for test in self._tests if test.failed and test.fired]
        missed = [test for test in self._tests if not test.failed and test.fired]
        never_fired = [test for test in self._tests if not test.fired]
        terminalreporter.section(f"planted: {self._fault.name}", "=")
        terminalreporter.line(self._fault.sentence)
        terminalreporter.line(f"noticed by {len(noticed)} tests, which failed")
        terminalreporter.line(
            f"NOT NOTICED by {len(missed)} tests, which passed although the fault fired in them",
            red=bool(missed),
        )
        for test in missed[:MOST_LISTED]:
            terminalreporter.line(f"    {test.name}")
        if len(missed) > MOST_LISTED:
            terminalreporter.line(f"    ... and {len(missed) - MOST_LISTED} more")
        if never_fired:
            failed = sum(test.failed for test in never_fired)
            note = f" ({failed} of them failed for another reason)" if failed else ""
            terminalreporter.line(f"the fault never fired in {len(never_fired)} tests{note}")
