"""What a run leaves: results as JSON, lines of a record, and scripts for checks that differ."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.report.record import Record, listening, record_of, versions

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict


# The results of a run: every check, and every trial that did not run.
#
# Under xdist the workers attach results to pytest's reports, and the controller collects them.

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


# ``pytest --ddp-json PATH``: writes the results of a run as JSON.

OF_A_RECORD = frozenset(("digests", "details"))
"""They are known in a run that is recorded."""

OF_A_REPORT = frozenset(("report", "full_report", "headline", "file", "line"))

_error = pytest.StashKey[OSError]()


def written(config: pytest.Config, results: RunResults) -> bool:
    """Write the file, if the run has the option. Returns False if that fails."""
    path: Path | None = config.getoption("--ddp-json")
    if path is None:
        return True
    try:
        # A test may have changed the working folder.
        _write(config.invocation_params.dir / path, results, config.getoption("--must-run"))
    except OSError as error:
        config.stash[_error] = error
        return False
    return True


def say_if_not_written(config: pytest.Config, terminal: pytest.TerminalReporter) -> None:
    """Say that the file could not be written, if that is so."""
    error = config.stash.get(_error, None)
    if error is not None:
        terminal.line(
            f"--ddp-json {config.getoption('--ddp-json')}: FAILED, the results could not be "
            f"written: {error.strerror}",
            red=True,
        )


def _write(path: Path, results: RunResults, must_run: Sequence[str]) -> None:
    content = {
        "environment": versions(),
        "cases": [_case(record) for record in results.records],
        "not_run": [
            {"what": f"{trial.strategy} on {trial.layout} ({trial.lane})", "reason": trial.reason}
            for trial in results.trials_not_run
        ],
        "summary": _summary(results, must_run),
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _case(record: Record) -> Mapping[str, object]:
    """The fields of a record; those of a report only where there is one."""
    fields = {name: value for name, value in asdict(record).items() if name not in OF_A_RECORD}
    if record.report:
        return fields
    return {name: value for name, value in fields.items() if name not in OF_A_REPORT}


def _summary(results: RunResults, must_run: Sequence[str]) -> Mapping[str, object]:
    """The counts of a run."""
    planted, not_planted, compared = results.planted, results.not_planted, results.compared
    expected_same = [record for record in not_planted if record.expected == "same"]
    known = [record for record in not_planted if record.known]
    return {
        "compared": len(compared),
        "same": sum(record.outcome == "same" for record in expected_same),
        "different": sum(record.outcome == "different" for record in expected_same),
        "unknown": sum(record.outcome == "unknown" for record in not_planted),
        "known_differences": len(known),
        "known_differences_confirmed": sum(record.confirmed for record in known),
        "not_run": len(results.trials_not_run),
        "planted": len(planted),
        "planted_caught": sum(record.outcome == "different" for record in planted),
        "planted_named": sum(record.planted in record.causes for record in planted),
        "parameters_compared": sum(record.parameters * record.ranks for record in compared),
        "lanes": dict(Counter(record.backend for record in compared)),
        "must_run_missing": list(results.lanes_missing(must_run)),
    }


# Record every check that a test makes, and every trial of the catalogue that did not run.

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

    with listening(record):
        yield


def records_of(item: pytest.Item, report: pytest.TestReport) -> Sequence[Record]:
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


def not_run_of(item: pytest.Item, report: pytest.TestReport) -> NotRun | None:
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


# ``pytest --ddp-export-repro DIR``: a script for every check that differs in a failing test.

_requests = pytest.StashKey[list[tuple["Request", str]]]()
"""The requests whose scripts are written if the test fails, with the first line of the report."""


@contextmanager
def requests_kept(item: pytest.Item) -> Iterator[None]:
    """Keep the request of every check that differs, or whose ranks fail, inside the block."""
    item.stash[_requests] = []
    if item.config.getoption("--ddp-export-repro") is None:
        yield
        return

    def keep(verdict: Verdict, request: Request | None) -> None:
        if request is None:  # a script has an export of its own
            return
        if verdict.outcome == "different" or verdict.failure is not None:
            from ddp_equivalence.report.render import headline_text

            item.stash[_requests].append((request, headline_text(verdict)))

    with listening(keep):
        yield


def export(item: pytest.Item) -> Iterator[str]:
    """Write the scripts of a failed test. Yields each script's path, or why it was not written."""
    requests, item.stash[_requests] = item.stash[_requests], []
    if not requests:
        return
    # A test may have changed the working folder.
    given = item.config.getoption("--ddp-export-repro")
    folder = item.config.invocation_params.dir / given
    for number, (request, headline) in enumerate(requests, start=1):
        from ddp_equivalence.report.script import command_of, export_request, file_name

        name = item.nodeid if len(requests) == 1 else f"{item.nodeid}-{number}"
        try:
            path = export_request(request, folder, headline=headline, name=file_name(name))
        except (ValueError, OSError) as error:
            yield f"no script: {error}"
        else:
            shown = given / path.name
            yield f"{shown} ({command_of(shown)})"
