"""What ranks exchange in a forward pass, and how its gradient comes back."""

from __future__ import annotations

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.cut_graph import own_backward_lines
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.measurement.calls import Contents, Kind


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
