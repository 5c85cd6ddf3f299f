"""What ranks exchange in a forward pass, and how its gradient comes back."""

from __future__ import annotations

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.reduction_groups import groups_text
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.cut_graph import own_backward_lines
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.measurement.calls import Call, Contents, Kind

MOST_NUMBERS = 16
"""A tensor with more elements is no count, or a few of them."""


def exchange_lines(pieces: Pieces, piece: Piece) -> list[PointedLine]:
    """The last collective of something else than gradients or parameters before a backward pass:
    with it, what a rank computes may depend on the rows of others. And the backward methods of the
    user's own that ran then.
    """
    places = pieces.view.observed.calls.places(
        Kind.COLLECTIVE,
        where=lambda call: (
            piece.call is not None
            and call.backwards == piece.call.backwards
            and not call.in_backward
            and call.collective is not None
            and call.collective.contents is Contents.OTHER
            and call.collective.elements > 1
        ),
    )
    lines = [
        place.pointed(f"{place.first.collective.op} before backward")
        for place in places[-1:]
        if place.first.collective is not None
    ]
    return [*lines, *own_backward_lines(pieces, piece)] if lines else []


def lines_of_separate_counts(view: View) -> list[PointedLine]:
    """The lines that add up numbers before backward in groups that no other such line joins: each
    group has another number then.
    """

    def adds_up(call: Call) -> bool:
        collective = call.collective
        return (
            collective is not None
            and collective.op == "all_reduce"
            and collective.contents is Contents.OTHER
            and collective.elements <= MOST_NUMBERS
            and call.backwards == 0
            and not call.in_backward
        )

    places = view.observed.calls.places(Kind.COLLECTIVE, where=adds_up)
    ranks = set(range(view.world_size))
    if any(set(group) == ranks for place in places for group in place.groups):
        return []
    return [
        place.pointed(
            f"sums in {groups_text(place.groups)}, and none over all {view.world_size} ranks",
            is_fault=True,
        )
        for place in places
        if len(place.groups) > 1 and len(places) == 1
    ]
