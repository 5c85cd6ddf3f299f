"""The lines of the user's code that only some ranks ran."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts import ranked
from ddp_equivalence.measurement.calls import CodeLine

MOST_LINES = 1


def lines_only_on(view: View, ranks: Sequence[int]) -> list[PointedLine]:
    """The first line that exactly these ranks ran, or else exactly the others; [] if there is none.

    All steps count, and lines of the forward and the backward pass too.
    """
    if len(ranks) in (0, view.world_size):
        return []
    others = tuple(rank for rank in range(view.world_size) if rank not in ranks)
    run: dict[CodeLine, list[int]] = {}
    for rank, seen in sorted(view.observed.by_rank.items()):
        for line in seen.trace.lines_run or {}:
            run.setdefault(line, []).append(rank)
    for wanted in (tuple(ranks), others):
        found = sorted(
            (line for line, by in run.items() if tuple(by) == wanted),
            key=lambda line: (line.file, line.number),
        )
        if found:
            who = ranked(wanted, view.world_size)
            note = f"only {who} {'runs' if len(wanted) == 1 else 'run'} this line"
            return [PointedLine(found[0], note, True)]
    return []
