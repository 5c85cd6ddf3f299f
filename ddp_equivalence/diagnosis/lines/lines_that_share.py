"""The lines that choose which of all examples a rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.examples_read import read_by_no_rank, short_numbers
from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.lines.lines_that_read import reads
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.sources import Choice, Sources
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

MOST_SHARING = 2
"""So many lines are shown: of the three that fit, one is where the rows are read."""

FEWEST = 2
"""Shorter lists of positions may be a list of something else."""

NEAR = 1
"""To see the rank, names must be looked up so often more than in the line that is nearest to it."""

MOST_NAMES = 2
MOST_ENTRIES = 4


def lines_that_share(view: View, ranks: Sequence[int] = ()) -> list[PointedLine]:
    """The line that first held the positions of just what each rank reads, and those that choose
    with numbers of the rank what the model was called with. ``ranks``: those that read wrongly.
    """
    listed, choices = _lines_and_choices(view, ranks)
    chosen = [_pointed(one) for one in _clearest(choices)]
    return [*listed, *chosen][:MOST_SHARING]


def lines_that_leave_out(view: View) -> list[PointedLine]:
    """The same, where examples were read by no rank. What cuts the end off is no matter of ranks:
    if only the last ones are missing, a line that chooses without the rank comes first.
    """
    listed, choices = _lines_and_choices(view, ())
    others = [one for one in choices if one.distance is None]
    sharing = _clearest(choices)
    unread, count = read_by_no_rank(view), view.setting.example_count
    if unread == list(range(count - len(unread), count)):
        sharing = [*others[:1], *sharing]
    return [*listed, *map(_pointed, sharing or others)][:MOST_SHARING]


def _lines_and_choices(view: View, ranks: Sequence[int]) -> tuple[list[PointedLine], list[Choice]]:
    """The line with the positions, and the choices on other lines; not where rows are read."""
    rank = next(iter(ranks), min(view.observed.by_rank, default=0))
    listed = _line_of_positions(view, rank)
    lines = [*(place.line for place in reads(view)), *(one.line for one in listed)]
    known = {_place_in_file(line) for line in lines}
    return listed, [one for one in _choices(view, rank) if _place_in_file(one.line) not in known]


def _place_in_file(line: CodeLine) -> tuple[str, int]:
    """A comprehension may be a function of its own, on the same line."""
    return line.file, line.number


def with_reads(chosen: Sequence[PointedLine], read: Sequence[PointedLine]) -> list[PointedLine]:
    """These lines, and those at which rows are read; each line once, with the note of the latter if
    it has none of its own.
    """
    notes = {_place_in_file(one.line): one.note for one in read}
    known = {_place_in_file(one.line) for one in chosen}
    return [
        *(replace(one, note=one.note or notes.get(_place_in_file(one.line), "")) for one in chosen),
        *(one for one in read if _place_in_file(one.line) not in known),
    ]


def _pointed(choice: Choice) -> PointedLine:
    names = list(choice.names[:MOST_NAMES])
    return PointedLine(choice.line, f"uses {' and '.join(names)}" if names else "", True)


def _clearest(choices: Sequence[Choice]) -> list[Choice]:
    """The first ones from which it is not far to the rank; one of them names it, if any does."""
    of_rank = [(one.distance, one) for one in choices if one.distance is not None]
    least = min((distance for distance, _ in of_rank), default=0)
    near = [one for distance, one in of_rank if distance <= least + NEAR]
    near = [one for one in near if one.computes] or near
    first = near[:MOST_SHARING]
    direct = [one for one in near if not one.distance]
    if direct and not any(one in direct for one in first):
        first[-1:] = direct[:1]
    return first


def _line_of_positions(view: View, rank: int) -> list[PointedLine]:
    """The first line at which each rank had a list of the positions that it read, and no others."""
    by_rank = {one: _first_list(view, one) for one in view.observed.by_rank}
    found = [call for call in by_rank.values() if call is not None]
    lines = {call.users_line or call.line for call in found}
    if len(found) < len(by_rank) or len(lines) != 1 or None in lines:
        return []
    called = by_rank[rank]
    assert called is not None
    same = [one for one, call in by_rank.items() if call and call.examples == called.examples]
    first = view.setting.first_example
    numbers = short_numbers([one - first for one in called.examples], MOST_ENTRIES)
    note = f"{called.what} is {numbers} on {ranks_by_number(same)}"
    line = called.users_line or called.line
    assert line is not None
    return [PointedLine(line, note, True)]


def _first_list(view: View, rank: int) -> Call | None:
    parts = (view.observed.examples_read or {rank: ()})[rank]
    first = view.setting.first_example
    read = sorted(first + one for part in parts for one in part)
    if len(read) < FEWEST or len(set(read)) >= view.setting.example_count:
        return None
    calls = view.observed.calls.of(rank)
    return next(
        (one for one in calls if one.kind is Kind.INDICES and sorted(one.examples) == read), None
    )


def _choices(view: View, rank: int) -> list[Choice]:
    """The lines on the way to what the model was called with that choose what it holds."""
    sources = Sources(run_lines(view, rank))
    found: dict[CodeLine, Choice] = {}
    for line in _lines_of_inputs(view, rank):
        for one in sources.choices(line):
            found.setdefault(one.line, one)
    return list(found.values())


def _lines_of_inputs(view: View, rank: int) -> list[CodeLine]:
    places = [place for place in reads(view) if rank in place.by_rank]
    forwards = view.observed.calls.places(Kind.FORWARD)
    passes = [place for place in forwards if rank in place.by_rank]
    return [place.line for place in (*places, *passes)]
