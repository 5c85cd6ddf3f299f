"""The lines that gave a rank other weights than those of the case, before its backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.lines.meeting_lines import meeting_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

MOST_WEIGHT_LINES = 2


def lines_of_weights(view: View, rank: int, backward: Call | None = None) -> list[PointedLine]:
    """The lines of this step after which a rank held other weights, before any backward pass.

    [] if it held the weights of the case again in the end. ``backward``: of a function of the
    user's that changes them for a caller which then calls backward, the line of the caller.
    """
    places = view.observed.calls.places(
        Kind.WEIGHTS, where=lambda call: not call.backwards and not call.in_backward
    )
    of_rank = [place for place in places if rank in place.by_rank]
    changes = [
        call
        for call in view.observed.calls.of(rank)
        if call.kind is Kind.WEIGHTS and not call.backwards
    ]
    if not changes or not changes[-1].what:
        return []
    lines: dict[tuple[str, int], PointedLine] = {}
    for place in of_rank[:MOST_WEIGHT_LINES]:
        text = f"changes {_some(place.names)} before backward"
        met = meeting_lines(place.by_rank[rank][0], backward) if backward is not None else None
        line = place.line if met is None else met[0]
        where = "" if line == place.line else f"line {place.line.number} "
        lines.setdefault((line.file, line.number), PointedLine(line, f"{where}{text}", True))
    return list(lines.values())


def weights_text(view: View, rank: int) -> str:
    """What these lines changed, as a sentence; "" if there are none."""
    if not lines_of_weights(view, rank):
        return ""
    names = dict.fromkeys(
        name
        for call in view.observed.calls.of(rank)
        if call.kind is Kind.WEIGHTS and not call.backwards
        for name in call.names
    )
    return f"Before backward, the step changes {_some(list(names))}."


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters, such as {names[0]}"
