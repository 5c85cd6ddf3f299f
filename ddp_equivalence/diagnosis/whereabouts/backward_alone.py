"""Only the way back is wrong: the losses are those of the rows, and the reduction is a mean."""

from __future__ import annotations

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.cut_graph import SAME, own_backward_lines
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces, pieces_of
from ddp_equivalence.measurement.calls import Kind


def backward_alone_is_wrong(view: View) -> bool:
    """True if every rank holds the mean of what the ranks computed, and every backward pass began
    at the loss of its rows. What differs then came in between.
    """
    if not view.observed.by_rank or view.world_size == 1:
        return False
    pieces = pieces_of(view)
    if pieces is None or not pieces.all or pieces.is_coarse:
        return False
    held = view.measured.by_rank
    mean = view.on_every_rank(pieces.own.mean(0))
    return unexplained(held, mean) <= pieces.tolerance and losses_are_right(pieces)


def losses_are_right(pieces: Pieces) -> bool:
    """True if every backward pass began at the loss of its rows."""
    for piece in pieces.all:
        alone = pieces.alone(piece)
        if alone is None or piece.loss is None:
            return False
        if abs(piece.loss - alone.loss) > max(SAME, pieces.tolerance) * abs(alone.loss):
            return False
    return True


def backward_lines(pieces: Pieces) -> list[PointedLine]:
    """The backward methods of the user's own that ran on the first rank, and the last hook."""
    hooks = [
        place.pointed("a hook on the way back", is_fault=True)
        for place in pieces.view.observed.calls.places(Kind.TENSOR_HOOK)
    ]
    return [*own_backward_lines(pieces, pieces.all[0]), *hooks[-1:]]
