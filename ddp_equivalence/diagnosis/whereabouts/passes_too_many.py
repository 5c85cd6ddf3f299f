"""A backward pass adds to gradients that would be right without it, as one through another's loss.

In adversarial training, for example, the generator's loss also reaches the weights of the critic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.gradient_path import line_of
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    Whereabouts,
    distinct,
    named,
    of_all,
)

FIX = "keep this backward pass from these parameters, or clear what it leaves there."


def fault_of_a_pass(pieces: Pieces, uniform: float) -> Whereabouts | None:
    """The pass of each rank that is one too many; None if leaving out one changes nothing.

    ``uniform``: every rank holds this many times what all ranks have computed together.
    """
    view, counts = pieces.view, {len(of_rank) for of_rank in pieces.by_rank}
    if len(counts) != 1 or min(counts) < 2:
        return None
    names = [name for name in view.parameters.names if name in view.measured.differing]
    if not names:
        return None
    elements = view.parameters.positions_of(names)
    total, right = pieces.own.sum(0)[elements], view.expected[elements]
    found = []
    for number in range(counts.pop()):
        passes = [of_rank[number] for of_rank in pieces.by_rank]
        added = torch.stack([one.gradient for one in passes]).sum(0)[elements]
        if _equal(uniform * (total - added), right, pieces.tolerance) and bool(added.any()):
            found.append(passes)
    if len(found) != 1:
        return None
    passes = found[0]
    gradients = of_all(names, view.parameters.names)
    return Whereabouts(
        kind="own gradient",
        headline="one backward pass too many reaches some parameters",
        sentence=f"Without what one of the backward passes adds, {gradients} would be right.",
        lines=distinct([_line(passes[0], names), *_others(pieces, passes[0])]),
        parameters=tuple(names),
        ranks=tuple(view.setting.reporting_ranks),
        fix=FIX,
        explains_all=True,
    )


def _line(piece: Piece, names: list[str]) -> PointedLine | None:
    line = None if piece.call is None else line_of(piece.call)
    note = f"adds to the gradients of {named(names)}, which are right without it"
    return None if line is None else PointedLine(line, note, is_fault=True)


def _others(pieces: Pieces, wrong: Piece) -> list[PointedLine | None]:
    """The other backward passes of the same rank."""
    lines = [
        line_of(one.call)
        for one in pieces.by_rank[wrong.rank]
        if one is not wrong and one.call is not None
    ]
    return [PointedLine(line, "another backward pass") for line in lines if line is not None]


def _equal(found: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool(found.isfinite().all()) and float((found - right).norm()) <= tolerance * float(
        right.norm()
    )
