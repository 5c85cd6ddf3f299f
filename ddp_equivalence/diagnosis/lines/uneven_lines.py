"""The lines of the user's code that the ranks ran differently often."""

from __future__ import annotations

from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine

MOST_NUMBERS = 6


def lines_run_unevenly(view: View) -> list[PointedLine]:
    """The lines that not all ranks ran equally often, in the order in which they ran first."""
    counts: dict[CodeLine, dict[int, int]] = {}
    for rank, seen in sorted(view.observed.by_rank.items()):
        for line, times in (seen.trace.times_run or {}).items():
            counts.setdefault(line, {})[rank] = times
    ranks = sorted(view.observed.by_rank)
    found = []
    for line, by_rank in counts.items():
        times_by_rank = [by_rank.get(rank, 0) for rank in ranks]
        if len(set(times_by_rank)) == 1:
            continue
        place = place_of(line.file, line.number)
        note = "the ranks do not run it equally often"
        run = run_lines(view, next(rank for rank in ranks if by_rank.get(rank)))
        if place is not None and run.exact_count(place, place.statement) is not None:
            shown = ", ".join(map(str, times_by_rank[:MOST_NUMBERS]))
            note = f"runs {shown}{', ...' if len(ranks) > MOST_NUMBERS else ''} times, by rank"
        found.append(PointedLine(line, note))
    return found
