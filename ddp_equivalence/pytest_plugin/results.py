"""The results of a run: every check, every trial that did not run, and the table and the files made
of them.

Under xdist the workers attach results to pytest's reports, and the controller collects them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.gate.record import CANNOT_WRITE, RecordWriter
from ddp_equivalence.report.record import Record, listening, record_of, versions
from ddp_equivalence.report.text import (
    Line,
    NotWritten,
    Style,
    aligned,
    encodable,
    paragraph,
    plural,
    rank_names,
    ranks_by,
    what_is_not_written,
    write_file,
)

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
        if attached["counts"]:
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
    judged = made.records if expected_to_fail else _judged(item, report, made.records)
    rank_set = sys.modules.get("ddp_equivalence.ranks.rank_set")  # nothing is imported for that
    report.__dict__[ATTRIBUTE] = {
        "records": [asdict(record) for record in judged],
        "counts": not expected_to_fail,
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
        write_file(whole, json.dumps(content, indent=1, allow_nan=False) + "\n")
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
        "planted_named": sum(map(_is_named, planted)),
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
            self._line("collected", tests=tests)

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
        worker = getattr(reports[-1], "worker_id", "")
        attached = [getattr(one, ATTRIBUTE) for one in reports if hasattr(one, ATTRIBUTE)]
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
        for number, check in enumerate(one for of in attached for one in of["records"]):
            fields = {name: check[name] for name in OF_CHECKS}
            self._line("check", test=f"{self._of}{nodeid}", number=number, **fields)

    def _test(self, nodeid: str, **fields: Any) -> None:
        self._line("test", id=f"{self._of}{nodeid}", **fields)

    def _line(self, kind: str, **fields: Any) -> None:
        try:
            self._writer.write(kind, **fields)
        except NotWritten as error:
            pytest.exit(what_is_not_written(error), CANNOT_WRITE)


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # it was skipped
        return _first_line(report.longrepr[2].removeprefix("Skipped: "))
    crash = getattr(report.longrepr, "reprcrash", None)
    return _first_line(str(report.longrepr) if crash is None else crash.message)


def _first_line(text: str) -> str:
    return " ".join(text.strip().partition("\n")[0].split())[:LONGEST_REASON]


# The table that ends every run: what was compared with one big batch, and what was not.

DIFFER = "differ, as their tests expect"
NARROWEST_COLUMN = 4
NONE = "–"

MOST_ROWS = 3
"""If more steps than this cannot run for the same reason, they are listed together."""

OUTCOMES = {"same": "same", "different": "DIFFER", "unknown": "UNKNOWN"}


def write_lines(terminal: pytest.TerminalReporter, lines: Iterable[Line]) -> None:
    """Print lines in colours, whatever the terminal can show."""
    for line in lines:
        # Pytest replaces sys.stdout while it captures, but writes to what it was before.
        text = encodable(line.text, sys.__stdout__)
        terminal.line(text, red=line.style is Style.BAD, yellow=line.style is Style.UNCERTAIN)


def summary_lines(results: RunResults, must_run: Sequence[str] = ()) -> Iterator[Line]:
    """The table, line by line: a row for each strategy or step, then the totals."""
    not_planted = [record for record in results.records if not record.planted]
    planted = [record for record in results.records if record.planted]
    expected_same = [record for record in not_planted if record.expected == "same"]
    names = sorted({record.strategy for record in expected_same})
    never_ran = sorted({trial.strategy for trial in results.trials_not_run} - set(names))
    width = max(map(len, [*names, *never_ran, DIFFER])) + 2
    yield from _rows(results, expected_same, not_planted, never_ran, width)
    yield from _expected_by_their_tests(not_planted, width)
    yield from _known_differences([one for one in not_planted if one.known], width)
    yield from _planted_faults(planted, width)
    # Trials of strategies that ran on other layouts or lanes.
    more = [one for one in results.trials_not_run if one.strategy not in never_ran]
    for (lane, reason), count in Counter((one.lane, one.reason) for one in more).items():
        text = f"NOT RUN: {count} more {plural(count, 'case')} on {lane}: {reason}"
        yield Line(text, Style.UNCERTAIN)
    if not_planted or not planted:
        yield from _totals(results.compared)
        for lane in results.lanes_missing(must_run):
            text = f"--must-run {lane}: FAILED, nothing was compared on this lane"
            yield Line(f"{text}{_what_it_needs(lane)}", Style.BAD)


def _rows(
    results: RunResults,
    expected_same: Sequence[Record],
    not_planted: Sequence[Record],
    never_ran: Sequence[str],
    width: int,
) -> Iterator[Line]:
    layouts = sorted({record.layout for record in not_planted}, key=_size)
    names = sorted({record.strategy for record in expected_same})
    counts = Counter((one.strategy, one.layout) for one in expected_same if one.was_compared)
    rows = [(name, *(counts[name, layout] or NONE for layout in layouts)) for name in names]
    blank = (" " * width, *(NONE for _ in layouts))
    head, *lines, of_none = aligned([("", *layouts), *rows, blank], narrowest=NARROWEST_COLUMN)
    if layouts and (names or never_ran):
        yield Line(head)
    for name, line in zip(names, lines, strict=True):
        outcomes = Counter(one.outcome for one in expected_same if one.strategy == name)
        state = ", ".join(f"{outcomes[one]} {OUTCOMES[one]}" for one in OUTCOMES if outcomes[one])
        all_same = set(outcomes) == {"same"}
        style = Style.PLAIN if all_same else Style.BAD
        yield Line(f"{line}    {'same' if all_same else state}", style)
    by_reason: dict[str, list[str]] = {}
    for name in never_ran:
        reasons = {trial.reason for trial in results.trials_not_run if trial.strategy == name}
        by_reason.setdefault("; ".join(sorted(reasons)), []).append(name)
    for reason, lacking in by_reason.items():
        if len(lacking) > MOST_ROWS:
            yield Line(f"NOT RUN: {reason}:", Style.UNCERTAIN)
            yield from paragraph(", ".join(lacking), "  ")
            continue
        for name in lacking:
            yield Line(f"{name}{of_none[len(name) :]}    NOT RUN: {reason}", Style.UNCERTAIN)


def _size(name: str) -> tuple[int, int, str]:
    layout = parse(name)
    return layout.world_size, layout.nodes, name


def _what_it_needs(lane: str) -> str:
    """Says what this machine lacks for any case on the lane, as the end of a sentence."""
    from ddp_equivalence.ranks.lanes import missing  # imports torch

    reason = None if lane == "emulated" else missing(lane, 1)
    return f", which {reason}" if reason else ""


def _expected_by_their_tests(records: Sequence[Record], width: int) -> Iterator[Line]:
    """Checks that came out different or unknown in tests that passed because they expect it."""
    judged = [record for record in records if not record.known and record.expected != "same"]
    differ = [record for record in judged if record.outcome == "different"]
    if differ:
        causes = ", ".join(sorted({record.cause or "no known cause" for record in differ}))
        yield Line(f"{DIFFER:<{width}}{len(differ)} ({causes})")
    if len(judged) > len(differ):
        yield Line(f"{'unknown, as their tests expect':<{width}}{len(judged) - len(differ)}")


def _known_differences(known: Sequence[Record], width: int) -> Iterator[Line]:
    """Trials of the catalogue that are known to differ: how many do, and under which name."""
    if not known:
        return
    differ = [record for record in known if record.outcome == "different"]
    confirmed = sum(record.confirmed for record in known)
    yield Line(
        f"{'known differences':<{width}}{len(differ)} of {len(known)} differ, "
        f"{confirmed} of {len(known)} under their known name"
    )
    causes = Counter(record.cause for record in differ)
    names = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
    yield Line(f"{'':<{width}}{names}")


def _is_named(record: Record) -> bool:
    """True if the cause of the planted fault is among those that were accepted."""
    from ddp_equivalence.faults import FAULTS

    return FAULTS[record.planted].cause in record.causes


def _planted_faults(planted: Sequence[Record], width: int) -> Iterator[Line]:
    """The planted faults, which prove that the checks of the table could have failed."""
    if not planted:
        return
    shown = [record for record in planted if record.outcome != "unknown"]
    caught = [record for record in shown if record.outcome == "different"]
    named = [record for record in caught if _is_named(record)]
    rivals = sum(len(record.causes) > 1 for record in named)
    kinds = len({record.planted for record in shown})
    note = f"{kinds} {plural(kinds, 'kind')}"
    note += f"; {rivals} beside other causes that leave the same numbers" if rivals else ""
    # Some are caught by bits that differ between ranks, however small the error.
    ratios = [record.error / record.limit for record in caught if record.error and record.limit]
    distances = [ratio for ratio in ratios if ratio > 1]
    nearest = f", nearest {min(distances):.0e} limits away" if distances else ""
    counts = f"{len(caught)} of {len(shown)} caught, {len(named)} of {len(shown)} named"
    yield Line(f"{'planted faults':<{width}}{counts} ({note}){nearest}")
    cannot_show = UnknownBecause.PLANTED_FAULT_CANNOT_SHOW.value
    hidden = sum(record.unknown_because == cannot_show for record in planted)
    for count, text, style in (
        (hidden, "more cannot show where they were planted, as their reports say", Style.PLAIN),
        (len(planted) - len(shown) - hidden, "UNKNOWN", Style.BAD),
        (len(shown) - len(caught), "MISSED", Style.BAD),
    ):
        if count:
            yield Line(f"{'':<{width}}{count} {text}", style)


def _totals(compared: Sequence[Record]) -> Iterator[Line]:
    """How much was compared, by lane and in all."""
    lanes = Counter(record.backend for record in compared)
    for lane, count in sorted(lanes.items()):
        reasons = Counter(record.lane_reason for record in compared if record.backend == lane)
        ((reason, times),) = reasons.most_common(1)
        mostly = "" if times == count else "mostly: "
        note = f" ({mostly}{reason})" if reason else ""
        yield Line(f"lane {lane}: {count} {plural(count, 'case')} compared{note}")
    if not compared:
        yield Line("NOTHING was compared with one big batch", Style.BAD)
        return
    ranks = sum(record.ranks for record in compared)
    gradients = sum(record.parameters * record.ranks for record in compared)
    yield Line(
        f"{len(compared)} {plural(len(compared), 'case')} compared with one big batch: "
        f"{gradients:,} gradients of parameters, on {ranks:,} ranks"
    )
