"""What the plugin adds to pytest's own output."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.diagnosis.time_left import progress_shown_by
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.pytest_plugin.results import NotRun, RunResults
from ddp_equivalence.report.record import Record, listening
from ddp_equivalence.report.text import (
    Line,
    Style,
    annotation,
    encodable,
    paragraph,
    plural,
    rank_names,
)

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict


# Shows on pytest's terminal how far the explanation of a difference is, if that takes long.

PROGRESS_LINE = "ddp_equivalence_progress_line"
"""The name under which ``ddp-equivalence run`` registers the line that says how far the run is."""


def shown_on_the_terminal(config: pytest.Config) -> AbstractContextManager[None]:
    """Inside the block, progress goes to the terminal, past pytest's capture.

    A worker of xdist has no terminal, and shows nothing.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")

    def show(line: str) -> None:
        if reporter is None:
            return
        if capture is None:  # pytest -p no:capture
            reporter.write_line(line)
            return
        below = config.pluginmanager.get_plugin(PROGRESS_LINE)
        hidden = nullcontext() if below is None else below.hidden()
        with capture.global_and_fixture_disabled(), hidden:
            reporter.ensure_newline()
            reporter.write_line(line)

    return progress_shown_by(show)


# Adds what the ranks printed to the test's report; pytest shows it if the test fails.


@contextmanager
def added_to_report(item: pytest.Item) -> Iterator[None]:
    """Add what ranks printed in the checks of the block. Ranks that printed the same share it."""

    def add_sections(verdict: Verdict, request: Request | None) -> None:
        ranks_by_output: dict[str, list[int]] = {}
        for rank, text in sorted(verdict.output.items()):
            if text.strip():
                ranks_by_output.setdefault(text, []).append(rank)
        for text, ranks in ranks_by_output.items():
            title = f"output of {rank_names(ranks)}"
            if len(ranks) == 1:
                title += f" (node {verdict.case.ranks.rows[ranks[0]].node})"
            item.add_report_section("call", title, text)

    with listening(add_sections):
        yield


# ``pytest --ddp-github``: an annotation of GitHub Actions for every failing check.


def write_annotations(terminal: pytest.TerminalReporter, results: RunResults) -> None:
    """Print the annotations, each on a line of its own, where GitHub reads them."""
    for record in results.records:
        if record.report and _has_failed(record):
            terminal.line(annotation(record.file, record.line, record.headline, record.report))


def _has_failed(record: Record) -> bool:
    """True if the test of this check failed because of it."""
    if record.known:
        return not record.confirmed
    return record.outcome != record.expected


# The table that ends every run: what was compared with one big batch, and what was not.

DIFFER = "differ, as their tests expect"
UNKNOWN = "unknown, as their tests expect"
NARROWEST_COLUMN = 6
NOTHING = "–"

MOST_ROWS = 3
"""If more steps than this cannot run for the same reason, they are listed together."""


def write(terminal: pytest.TerminalReporter, results: RunResults, must_run: Sequence[str]) -> None:
    """Print the table in colours."""
    write_lines(terminal, summary_lines(results, must_run))


def write_lines(terminal: pytest.TerminalReporter, lines: Iterable[Line]) -> None:
    """Print lines in colours, whatever the terminal can show."""
    for line in lines:
        # Pytest replaces sys.stdout while it captures, but writes to what it was before.
        text = encodable(line.text, sys.__stdout__)
        terminal.line(text, red=line.style is Style.BAD, yellow=line.style is Style.UNCERTAIN)


def summary_lines(results: RunResults, must_run: Sequence[str] = ()) -> Iterator[Line]:
    """The table, line by line: a row for each strategy or step, then the totals."""
    expected_same = [record for record in results.not_planted if record.expected == "same"]
    names = sorted({record.strategy for record in expected_same})
    never_ran = sorted({trial.strategy for trial in results.trials_not_run} - set(names))
    width = max(map(len, [*names, *never_ran, DIFFER])) + 2
    layouts = sorted({record.layout for record in results.not_planted}, key=_size)
    columns = {layout: max(NARROWEST_COLUMN, len(layout) + 2) for layout in layouts}

    def row(name: str, cells: Sequence[str]) -> str:
        shown = zip(cells, columns.values(), strict=True)
        return f"{name:<{width}}" + "".join(f"{cell:>{column}}" for cell, column in shown)

    if layouts and (names or never_ran):
        yield Line(row("", layouts))
    for name in names:
        records = [record for record in expected_same if record.strategy == name]
        counts = Counter(record.layout for record in records if record.was_compared)
        cells = [str(counts[layout] or NOTHING) for layout in layouts]
        state, style = _state(records)
        yield Line(f"{row(name, cells)}    {state}", style)
    by_reason: dict[str, list[str]] = {}
    for name in never_ran:
        reasons = sorted({one.reason for one in results.trials_not_run if one.strategy == name})
        by_reason.setdefault("; ".join(reasons), []).append(name)
    for reason, lacking in by_reason.items():
        if len(lacking) > MOST_ROWS:
            yield Line(f"NOT RUN: {reason}:", Style.UNCERTAIN)
            yield from paragraph(", ".join(lacking), "  ")
            continue
        for name in lacking:
            of_none = row(name, [NOTHING] * len(layouts))
            yield Line(f"{of_none}    NOT RUN: {reason}", Style.UNCERTAIN)
    yield from _expected_by_their_tests(results.not_planted, width)
    yield from _known_differences(results.not_planted, width)
    yield from _planted_faults(results.planted, width)
    yield from _more_not_run(
        [one for one in results.trials_not_run if one.strategy not in never_ran]
    )
    if results.not_planted or not results.planted:
        yield from _totals(results.compared)
        for lane in results.lanes_missing(must_run):
            text = f"--must-run {lane}: FAILED, nothing was compared on this lane"
            yield Line(f"{text}{_what_it_needs(lane)}", Style.BAD)


def _what_it_needs(lane: str) -> str:
    """What this machine lacks for any case on the lane, as the end of a sentence."""
    from ddp_equivalence.ranks.lanes import missing  # imports torch

    reason = None if lane == "emulated" else missing(lane, 1)
    return f", which {reason}" if reason else ""


def _size(name: str) -> tuple[int, int, str]:
    layout = parse(name)
    return layout.world_size, layout.nodes, name


def _state(records: Sequence[Record]) -> tuple[str, Style]:
    """The outcomes of one row: ``same`` if all are, otherwise the number of each."""
    outcomes = Counter(record.outcome for record in records)
    if set(outcomes) == {"same"}:
        return "same", Style.PLAIN
    words = {"same": "same", "different": "DIFFER", "unknown": "UNKNOWN"}
    counts = [f"{outcomes[name]} {word}" for name, word in words.items() if outcomes[name]]
    return ", ".join(counts), Style.BAD


def _expected_by_their_tests(records: Sequence[Record], width: int) -> Iterator[Line]:
    """Checks that came out different or unknown in tests that passed because they expect it."""
    judged = [record for record in records if not record.known and record.expected != "same"]
    differ = [record for record in judged if record.outcome == "different"]
    if differ:
        causes = ", ".join(sorted({record.cause or "no known cause" for record in differ}))
        yield Line(f"{DIFFER:<{width}}{len(differ)} ({causes})")
    if len(judged) > len(differ):
        yield Line(f"{UNKNOWN:<{width}}{len(judged) - len(differ)}")


def _known_differences(records: Sequence[Record], width: int) -> Iterator[Line]:
    """Trials of the catalogue that are known to differ: how many do, and under which name."""
    known = [record for record in records if record.known]
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


def _planted_faults(planted: Sequence[Record], width: int) -> Iterator[Line]:
    """The planted faults, which prove that the checks of the table could have failed."""
    if not planted:
        return
    shown = [record for record in planted if record.outcome != "unknown"]
    caught = [record for record in shown if record.outcome == "different"]
    named = sum(record.planted in record.causes for record in caught)
    rivals = sum(record.planted in record.causes[1:] for record in caught)
    kinds = len({record.planted for record in shown})
    note = f"{kinds} {plural(kinds, 'kind')}"
    note += f"; {rivals} beside other causes that leave the same numbers" if rivals else ""
    # Some are caught by bits that differ between ranks, however small the error.
    ratios = [record.error / record.limit for record in caught if record.error and record.limit]
    distances = [ratio for ratio in ratios if ratio > 1]
    nearest = f", nearest {min(distances):.0e} limits away" if distances else ""
    yield Line(
        f"{'planted faults':<{width}}{len(caught)} of {len(shown)} caught, {named} of {len(shown)} "
        f"named ({note}){nearest}"
    )
    hidden = sum(map(_cannot_show, planted))
    unknown = len(planted) - len(shown) - hidden
    missed = len(shown) - len(caught)
    for count, text, style in (
        (hidden, "more cannot show where they were planted, as their reports say", Style.PLAIN),
        (unknown, "UNKNOWN", Style.BAD),
        (missed, "MISSED", Style.BAD),
    ):
        if count:
            yield Line(f"{'':<{width}}{count} {text}", style)


def _cannot_show(record: Record) -> bool:
    """True if the fault was planted where the gradient is that of the big batch all the same."""
    return record.unknown_because == UnknownBecause.PLANTED_FAULT_CANNOT_SHOW.value


def _more_not_run(trials: Sequence[NotRun]) -> Iterator[Line]:
    """Trials of strategies that ran on other layouts or lanes."""
    counts = Counter((trial.lane, trial.reason) for trial in trials)
    for (lane, reason), count in counts.items():
        text = f"NOT RUN: {count} more {plural(count, 'case')} on {lane}: {reason}"
        yield Line(text, Style.UNCERTAIN)


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
