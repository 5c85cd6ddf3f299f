"""The lines of a loss that is a multiple of that of its rows, with the same multiple everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.lines_around_reduction import lines_of_divisor
from ddp_equivalence.diagnosis.lines.loss_lines import line_that_scales_loss
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.gradient_path import line_of
from ddp_equivalence.diagnosis.whereabouts.own_gradient_fault import SAME_LOSS, Compared
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.station_text import at


def lines_of_loss_factor(
    pieces: Pieces, compared: Sequence[Compared], factor: float
) -> list[PointedLine | None]:
    """The line that multiplies the loss by this number, the number's own line, and backward.

    Where backward begins at the loss of the rows, the line of the loss is not to blame.
    """
    call = compared[0].piece.call
    if call is None:
        return []
    begins = at(line_of(call), "backward begins")
    known = [one.loss_factor for one in compared if one.loss_factor is not None]
    if len(known) != len(compared) or any(abs(one / factor - 1) > SAME_LOSS for one in known):
        is_right = bool(known) and all(abs(one - 1) <= SAME_LOSS for one in known)
        note = "the loss of the rows" if is_right else "the loss"
        return [at(call.made_at, note, not is_right), at(line_of(call), "backward begins", True)]
    made = at(call.made_at, f"the loss is {text_of(factor, '.4g')} times that of its rows", True)
    scales = line_that_scales_loss(pieces.view, factor) or made
    if scales is None:
        return [begins]
    number = lines_of_divisor(pieces.view, compared[0].piece.rank, scales.line)
    return [scales, *number[:1], begins]
