"""No collective that Python issued after backward joins some ranks with the others."""

from __future__ import annotations

import ast

from ddp_equivalence.diagnosis.lines.lines_around_reduction import way_to
from ddp_equivalence.diagnosis.lines.origins import links_of
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import inside, place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import REDUCING, Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, ranked
from ddp_equivalence.measurement.calls import Call, Kind


def ranks_not_joined(pieces: Pieces) -> Whereabouts | None:
    """None unless all collectives after backward were seen, and keep the ranks in several sets."""
    view = pieces.view
    places = view.observed.calls.places(Kind.COLLECTIVE, where=_after_backward)
    reducing = [
        one
        for one in places
        if one.first.collective is not None and one.first.collective.op in REDUCING
    ]
    if view.observed.wrappers or not reducing or _sends(view):
        return None
    sets = _joined(view.world_size, [group for one in places for group in one.groups])
    if len(sets) == 1 or min(map(len, sets)) < 2:
        return None
    apart = ", or with ".join(ranked(one, view.world_size) for one in sets[1:])
    what = f"joins {ranked(sets[0], view.world_size)} with {apart}"
    last = reducing[-1]
    return Whereabouts(
        "reduction",
        "no collective joins all ranks",
        f"No collective that Python issued after backward {what}.",
        distinct(
            [
                *_group_of(view, last),
                last.pointed(f"over {ranked(last.groups[0], view.world_size)}, for example", True),
            ]
        ),
        fix=f"reduce over groups that join all {view.world_size} ranks.",
    )


def _after_backward(call: Call) -> bool:
    return call.backwards > 0


def _sends(view: View) -> bool:
    return any(
        call.kind is Kind.POINT_TO_POINT
        for rank in view.observed.by_rank
        for call in view.observed.calls.of(rank)
    )


def _joined(world_size: int, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The sets of ranks that groups join, directly or through others."""
    sets = [{rank} for rank in range(world_size)]
    for group in groups:
        touched = [one for one in sets if one & set(group)]
        sets = [one for one in sets if not one & set(group)] + [set().union(*touched)]
    return sorted(tuple(sorted(one)) for one in sets)


def _group_of(view: View, place: Place) -> list[PointedLine]:
    """The line that gave the group of a collective its name."""
    run = run_lines(view, place.ranks[0])
    at = place_of(place.line.file, place.line.number)
    for node in [at.statement, *inside(at.statement)] if at is not None else ():
        if isinstance(node, ast.keyword) and node.arg == "group":
            assert at is not None
            way = way_to(view, place.first)
            links = links_of(run, at, node.value, way[1:])
            named = [one for one in links if one.line != place.line]
            note = f"the group of line {place.line.number}"
            return [PointedLine(one.line, f"sets {one.name}, {note}", True) for one in named[:1]]
    return []
