"""The lines that choose which of all examples a rank reads."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.examples_read import short_numbers
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

MOST_NAMES = 2
MOST_ENTRIES = 4


def lines_that_share(view: View, ranks: Sequence[int] = ()) -> list[PointedLine]:
    """The line that first held the positions of just what each rank reads, and those that choose
    with numbers of the rank what the model was called with. ``ranks``: those that read wrongly.
    """
    rank = next(iter(ranks), min(view.observed.by_rank, default=0))
    listed = _line_of_positions(view, rank)
    choices = _choices(view, rank)
    least = 0 if listed else min((one.distance for one in choices), default=0)
    chosen = [
        PointedLine(one.line, _note(one), True)
        for one in choices
        if one.distance == least and all(one.line != other.line for other in listed)
    ]
    return [*listed, *chosen][:MOST_SHARING]


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
    """The lines on the way to what the model was called with that choose with the rank."""
    sources = Sources(run_lines(view, rank))
    found: dict[CodeLine, Choice] = {}
    for line in _lines_of_inputs(view, rank):
        for one in sources.choices_of_rank(line):
            found.setdefault(one.line, one)
    return sorted(found.values(), key=lambda one: one.distance)


def _lines_of_inputs(view: View, rank: int) -> list[CodeLine]:
    places = [place for place in reads(view) if rank in place.by_rank]
    forwards = view.observed.calls.places(Kind.FORWARD)
    passes = [place for place in forwards if rank in place.by_rank]
    return [place.line for place in (*places, *passes)]


def _note(choice: Choice) -> str:
    names = list(choice.names[:MOST_NAMES])
    return f"uses {' and '.join(names)}" if names else ""
