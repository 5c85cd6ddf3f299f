"""Finds tests that would pass whatever their checks show."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from os.path import relpath
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.report.record import Reading, listening, watched

if TYPE_CHECKING:
    from ddp_equivalence.faults.plant import PlantedFault
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict


# Fails a test that makes a check and reads nothing of its verdict: it would pass whatever it is.
#
# A verdict belongs to the test that made it, or to the fixture in whose setup it was made. A test
# that has passed fails at its end if it has not kept the verdict. If it has kept it, a fixture
# may still read it, so the end of the test's teardown decides. The verdict of a fixture is judged
# when the fixture is torn down, after all tests that could have read it.

_returned = pytest.StashKey[list[Reading]]()
_passed = pytest.StashKey[bool]()


OF_UNREAD_VERDICTS = "ddp_equivalence_of_unread_verdicts"
"""The attribute of a failure that is raised here."""


class UnreadVerdicts:
    """Registered for every run, unless a fault is planted in its tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder = config.invocation_params.dir
        self._not_passed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        returned: list[Reading] = []
        not_passed_before = self._not_passed

        def judge() -> None:
            # A test that failed or was skipped may not have come to the line that reads.
            if self._not_passed == not_passed_before:
                self._judge(returned, f" in the fixture {fixturedef.argname}")

        # The finalizer that is added first runs last.
        fixturedef.addfinalizer(judge)
        with watched() as made:
            try:
                return (yield)
            finally:
                returned += made

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_returned] = []
        with watched() as made:
            result = yield
        item.stash[_returned] = made
        self._judge(one for one in made if not one.can_be_read)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        with watched() as made:
            result = yield
        if item.stash.get(_passed, False):
            self._judge([*item.stash[_returned], *made])
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and hasattr(call.excinfo.value, OF_UNREAD_VERDICTS):
            # A test that is expected to fail must fail for a reason that it has looked at.
            report.outcome = "failed"
            report.__dict__.pop("wasxfail", None)
        if report.when == "call":
            item.stash[_passed] = report.passed
        self._not_passed += not report.passed
        return report

    def _judge(self, returned: Iterable[Reading], of_fixture: str = "") -> None:
        """Fails if one of the verdicts was not read."""
        unread = [one for one in returned if not one.done]
        if unread:
            messages = (self._message(reading, of_fixture) for reading in unread)
            failure = pytest.fail.Exception("\n".join(messages), pytrace=False)
            setattr(failure, OF_UNREAD_VERDICTS, True)
            raise failure

    def _message(self, reading: Reading, of_fixture: str) -> str:
        return (
            f"{relpath(reading.file, self._folder)}:{reading.line}: The check of {reading.subject}"
            f"{of_fixture} came out {reading.outcome}, and nothing of its verdict was read. Write "
            'assert_equivalent(case, step), or assert check(case, step).outcome == "same".'
        )


# ``pytest --plant NAME``: plants a fault in every test, and lists the tests that do not notice.

MOST_LISTED = 20

ATTRIBUTE = "ddp_planted"
"""Attribute of a report: how often the fault fired. Xdist carries attributes."""

_fired = pytest.StashKey[int]()


class Planting:
    """Registered for a run with ``--plant``. Raises UsageError for a fault that is not known."""

    def __init__(self, name: str) -> None:
        from ddp_equivalence.faults.plant import fault_named

        try:
            self._fault = fault_named(name)
        except BadCase as error:
            raise pytest.UsageError(f"--plant is {name}; it should be {error.right}") from error
        self._noticed, self._missed = list[str](), list[str]()
        self._never_fired: list[bool] = []
        """For each test in which the fault did no damage: whether it failed."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Plant the fault in the test itself. Its fixtures have run before, without the fault."""
        from ddp_equivalence.faults.plant import planted

        fired_on_ranks: list[int] = []

        def count(verdict: Verdict, request: Request | None) -> None:
            fired_on_ranks.extend(one.planted or 0 for one in verdict.evidence.values())

        here: PlantedFault | None = None
        try:
            with planted(self._fault.name) as here, listening(count):
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
        if fired:
            (self._noticed if report.failed else self._missed).append(report.nodeid)
        elif fired is not None:
            self._never_fired.append(report.failed)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        line, missed, never = terminalreporter.line, self._missed, self._never_fired
        terminalreporter.section(f"planted: {self._fault.name}", "=")
        line(self._fault.sentence)
        line(f"noticed by {len(self._noticed)} tests, which failed")
        but = "which passed although the fault fired in them"
        line(f"NOT NOTICED by {len(missed)} tests, {but}", red=bool(missed))
        for name in missed[:MOST_LISTED]:
            line(f"    {name}")
        if len(missed) > MOST_LISTED:
            line(f"    ... and {len(missed) - MOST_LISTED} more")
        if never:
            failed = sum(never)
            note = f" ({failed} of them failed for another reason)" if failed else ""
            line(f"the fault never fired in {len(never)} tests{note}")
