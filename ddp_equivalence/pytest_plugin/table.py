"""The table that ends every run: what was compared with one big batch, and what was not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.report.text import Line, Style, encodable, paragraph, plural

if TYPE_CHECKING:
    import pytest

    from ddp_equivalence.pytest_plugin.results import RunResults
    from ddp_equivalence.report.record import Record

DIFFER = "differ, as their tests expect"
NARROWEST_COLUMN = 6
NOTHING = "–"

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
    columns = {layout: max(NARROWEST_COLUMN, len(layout) + 2) for layout in layouts}

    def row(name: str, cells: Sequence[object]) -> str:
        shown = zip(cells, columns.values(), strict=True)
        return f"{name:<{width}}" + "".join(f"{cell:>{column}}" for cell, column in shown)

    if layouts and (expected_same or never_ran):
        yield Line(row("", layouts))
    for name in sorted({record.strategy for record in expected_same}):
        records = [record for record in expected_same if record.strategy == name]
        counts = Counter(record.layout for record in records if record.was_compared)
        outcomes = Counter(record.outcome for record in records)
        state = ", ".join(f"{outcomes[one]} {OUTCOMES[one]}" for one in OUTCOMES if outcomes[one])
        all_same = set(outcomes) == {"same"}
        text = row(name, [counts[layout] or NOTHING for layout in layouts])
        style = Style.PLAIN if all_same else Style.BAD
        yield Line(f"{text}    {'same' if all_same else state}", style)
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
            of_none = row(name, [NOTHING] * len(layouts))
            yield Line(f"{of_none}    NOT RUN: {reason}", Style.UNCERTAIN)


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
