"""The results of a run: every check, every trial that did not run, and the files made of them.

Under xdist the workers attach results to pytest's reports, and the controller collects them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddp_equivalence.gate.record import RecordWriter
from ddp_equivalence.report.record import Record, listening, record_of, versions
from ddp_equivalence.report.text import rank_names, ranks_by

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict

ATTRIBUTE = "ddp_equivalence"
"""Attribute of a report. Xdist carries attributes that are plain data."""


@dataclass(frozen=True)
class NotRun:
    """A trial of the catalogue that did not run, and why."""

    strategy: str
    layout: str
    lane: str
    reason: str


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
    def compared(self) -> Sequence[Record]:
        """The checks that reached a verdict, without those that were broken on purpose."""
        return [record for record in self.records if record.was_compared]

    def lanes_missing(self, must_run: Sequence[str]) -> Sequence[str]:
        """The lanes that had to run and on which nothing was compared."""
        lanes = {record.backend for record in self.compared}
        return [lane for lane in must_run if lane not in lanes]


# The checks of one test, and what is sent along with its report.


@dataclass
class _Made:
    """``requests``: those whose scripts are written if the test fails, with their headlines."""

    records: list[Record] = field(default_factory=list)
    requests: list[tuple[Request, str]] = field(default_factory=list)


_made = pytest.StashKey[_Made]()


@contextmanager
def checks_noted(item: pytest.Item) -> Iterator[None]:
    """Note the checks made inside the block; those of a ``self_check`` are in no table."""
    item.stash[_made] = made = _Made()
    counts = item.get_closest_marker("self_check") is None
    exports = item.config.getoption("--ddp-export-repro") is not None

    def note(verdict: Verdict, request: Request | None) -> None:
        _add_output(item, verdict)
        if counts:
            made.records.append(_record(item, verdict))
        # A script that is observed has no request: it has an export of its own.
        shows = verdict.outcome == "different" or verdict.failure is not None
        if exports and request is not None and shows:
            from ddp_equivalence.report.render import headline_text

            made.requests.append((request, headline_text(verdict)))

    with listening(note):
        yield


def _add_output(item: pytest.Item, verdict: Verdict) -> None:
    """Add what ranks printed to the report of the test. Ranks that printed the same share it."""
    printed = ((rank, text if text.strip() else None) for rank, text in verdict.output.items())
    for text, ranks in ranks_by(sorted(printed)).items():
        title = f"output of {rank_names(ranks)}"
        if len(ranks) == 1:
            title += f" (node {verdict.case.ranks.rows[ranks[0]].node})"
        item.add_report_section("call", title, text)


def _record(item: pytest.Item, verdict: Verdict) -> Record:
    option = item.config.getoption
    to_json, to_lines = option("--ddp-json") is not None, option("--ddp-lines") is not None
    planted = item.get_closest_marker("planted_fault")
    record = record_of(
        verdict,
        item.nodeid,
        expected="different" if item.get_closest_marker("difference") else "same",
        planted=planted.args[0] if planted else "",
        with_floor=to_json or to_lines,
        with_report=to_json or option("--ddp-github"),
        for_a_record=to_lines,
    )
    if record.report and not record.file:  # nothing of it is the user's code but the test
        file, line, _ = item.location
        return replace(record, file=str(item.config.rootpath / file), line=(line or 0) + 1)
    return record


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Send the results of the test along with its report, and scripts if it has failed."""
    made = item.stash[_made]
    expected_to_fail = report.when == "call" and report.skipped and hasattr(report, "wasxfail")
    trial, not_run = item.get_closest_marker("trial"), None
    if trial is not None and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        strategy, layout, lane = trial.args
        not_run = asdict(NotRun(strategy, layout, lane, reason.removeprefix("Skipped: ")))
    rank_set = sys.modules.get("ddp_equivalence.ranks.rank_set")  # nothing is imported for that
    report.__dict__[ATTRIBUTE] = {
        "records": [asdict(record) for record in _judged(item, report, made.records)],
        "of_expected_failure": list(map(asdict, made.records)) if expected_to_fail else [],
        "not_run": not_run,
        "spent": astuple(rank_set.SPENT) if rank_set else NOTHING,
    }
    if report.failed:
        report.sections += [("reproduction", line) for line in _exported(item, made)]


def _judged(
    item: pytest.Item, report: pytest.TestReport, made: Sequence[Record]
) -> Sequence[Record]:
    """The checks of the test that this report is about, with the outcomes that the test expected.

    A test that passed has judged its checks itself, so it expected the outcomes that they have. A
    test that was skipped has judged nothing.
    """
    if report.skipped or (report.when != "call" and not (report.when == "setup" and report.failed)):
        return ()
    if item.get_closest_marker("difference"):
        return [replace(record, known=True, confirmed=report.passed) for record in made]
    if report.passed:
        return [replace(record, expected=record.outcome) for record in made]
    return made


def _exported(item: pytest.Item, made: _Made) -> Iterator[str]:
    """Write the scripts of a failed test. Yields each script's path, or why it was not written."""
    requests, made.requests = made.requests, []
    for number, (request, headline) in enumerate(requests, start=1):
        from ddp_equivalence.report.script import command_of, export_request, file_name

        given: Path = item.config.getoption("--ddp-export-repro")
        folder = item.config.invocation_params.dir / given  # a test may have changed its folder
        name = file_name(item.nodeid if len(requests) == 1 else f"{item.nodeid}-{number}")
        try:
            path = export_request(request, folder, headline=headline, name=name)
        except (ValueError, OSError) as error:
            yield f"no script: {error}"
        else:
            yield f"{given / path.name} ({command_of(given / path.name)})"


# ``pytest --ddp-json PATH``: writes the results of a run as JSON.

OF_A_RECORD = frozenset(("digests", "details"))
"""They are known in a run that is recorded."""

OF_A_REPORT = frozenset(("report", "full_report", "headline", "file", "line"))


def write_json(config: pytest.Config, results: RunResults) -> str:
    """Write the file, if the run has the option. Returns why that failed, or ""."""
    path: Path | None = config.getoption("--ddp-json")
    if path is None:
        return ""
    content = {
        "environment": versions(),
        "cases": [_case(record) for record in results.records],
        "not_run": [
            {"what": f"{trial.strategy} on {trial.layout} ({trial.lane})", "reason": trial.reason}
            for trial in results.trials_not_run
        ],
        "summary": _summary(results, config.getoption("--must-run")),
    }
    try:
        # A test may have changed the working folder.
        whole = config.invocation_params.dir / path
        whole.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        return f"--ddp-json {path}: FAILED, the results could not be written: {error.strerror}"
    return ""


def _case(record: Record) -> Mapping[str, object]:
    """The fields of a record; those of a report only where there is one."""
    left_out = OF_A_RECORD if record.report else OF_A_RECORD | OF_A_REPORT
    return {name: value for name, value in asdict(record).items() if name not in left_out}


def _summary(results: RunResults, must_run: Sequence[str]) -> Mapping[str, object]:
    """The counts of a run."""
    compared = results.compared
    planted = [record for record in results.records if record.planted]
    not_planted = [record for record in results.records if not record.planted]
    expected_same = Counter(one.outcome for one in not_planted if one.expected == "same")
    known = [record for record in not_planted if record.known]
    return {
        "compared": len(compared),
        "same": expected_same["same"],
        "different": expected_same["different"],
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


# ``ddp-equivalence record``: adds every test and check to a record as soon as the test has ended.

LONGEST_REASON = 300

NOTHING = (0, 0.0)
"""The cost of a process before its first ranks: sets of ranks, and processor time."""

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
        self._spent: dict[str, tuple[int, float]] = {}

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
        worker, attached = getattr(reports[-1], "worker_id", ""), _attached(reports)
        starts, cpu_seconds = max((tuple(one["spent"]) for one in attached), default=NOTHING)
        starts_before, cpu_before = self._spent.get(worker, NOTHING)
        self._spent[worker] = starts, cpu_seconds
        self._test(
            nodeid,
            outcome=outcome,
            seconds=round(sum(report.duration for report in reports), 4),
            reason="; ".join(reasons),
            starts=max(0, starts - starts_before),
            cpu_seconds=round(max(0.0, cpu_seconds - cpu_before), 4),
        )
        checks = [one for of in attached for one in (*of["records"], *of["of_expected_failure"])]
        for number, check in enumerate(checks):
            fields = {name: check[name] for name in OF_CHECKS}
            self._writer.write("check", test=f"{self._of}{nodeid}", number=number, **fields)

    def _test(self, nodeid: str, **fields: Any) -> None:
        self._writer.write("test", id=f"{self._of}{nodeid}", **fields)


def _attached(reports: Sequence[pytest.TestReport]) -> list[dict[str, Any]]:
    found = (getattr(report, ATTRIBUTE, None) for report in reports)
    return [one for one in found if one is not None]


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # it was skipped
        return _first_line(report.longrepr[2].removeprefix("Skipped: "))
    crash = getattr(report.longrepr, "reprcrash", None)
    return _first_line(str(report.longrepr) if crash is None else crash.message)


def _first_line(text: str) -> str:
    return " ".join(text.strip().partition("\n")[0].split())[:LONGEST_REASON]
