"""The lines where the gradients of some ranks are lost."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.paths_of_ranks import where_they_part
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind


def lines_of_left_out(view: View, ranks: Sequence[int]) -> Sequence[PointedLine]:
    """Where the gradients of these ranks are cleared, or reduced without them.

    ``ranks``: those that are left out; () if these are not known.
    """
    if not ranks:
        return ()
    calls, who = view.observed.calls, ranks_by_number(ranks)
    cleared = _cleared_by(view, ranks)
    if cleared:
        note = f"clears gradients on {who}"
        return [place.pointed(note, is_fault=True) for place in cleared[-1:]]
    apart = [place for place in calls.reductions if not set(ranks) & _partners(place, ranks)]
    groups = sorted({group for place in apart for group in place.groups})
    made = calls.places(Kind.NEW_GROUP, where=lambda call: tuple(sorted(call.ranks)) in groups)
    pointed = [place.pointed(is_fault=True) for place in made[:1]]
    way = where_they_part(view, ranks)
    if way is not None and not pointed:
        pointed.append(way)
    note = f"reduces without {who}"
    pointed += [place.pointed(note, is_fault=not pointed) for place in apart[-1:]]
    return pointed


def _cleared_by(view: View, ranks: Sequence[int]) -> list[Place]:
    """The lines where only these ranks clear gradients after they have computed some."""

    def clears(call: Call) -> bool:
        return call.change is not None and call.change.cleared and call.backwards > 0

    places = view.observed.calls.changes(clears)
    return [place for place in places if set(place.ranks) == set(ranks)]


def _partners(place: Place, ranks: Sequence[int]) -> set[int]:
    """The ranks of the groups of this place that hold another rank than these."""
    return {rank for group in place.groups if set(group) - set(ranks) for rank in group}


def fix_of_left_out(view: View, ranks: Sequence[int]) -> str:
    """What to write so that the gradients of these ranks count."""
    size = view.world_size
    if ranks and _cleared_by(view, ranks):
        return f"keep the gradients of {ranks_by_number(ranks)}, and divide by {size}."
    who = ranks_by_number(ranks) if ranks else "every rank"
    return f"let {who} take part in an all_reduce of all {size} ranks, and divide by {size}."
