"""The forward passes of the ranks read other buffers than that of the big batch does."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.lines.lines_of_buffers import buffer_changes, buffers_apart
from ddp_equivalence.diagnosis.whereabouts.own_gradient_fault import Compared
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.diagnosis.whereabouts.station_text import at
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named, ranked

MOST_COMPARED = 16
"""The gradients of so many pieces are computed again."""

MOST_BUFFER_LINES = 2


def fault_of_buffers(pieces: Pieces, wrong: Sequence[Compared]) -> Whereabouts | None:
    """Says that buffers are the difference; None unless each of these pieces has the gradient that
    its rows give with the buffers of its rank.
    """
    changes = buffer_changes(pieces.view)
    if not changes or not all(_is_of_buffers(pieces, one.piece) for one in wrong[:MOST_COMPARED]):
        return None
    changed = dict.fromkeys(name for place in changes for name in place.names)
    apart = buffers_apart(pieces.view)
    names = [name for name in changed if name in apart] or list(changed)
    ranks = tuple(sorted({one.piece.rank for one in wrong}))
    who = ranked(ranks, pieces.view.world_size)
    verb = "computes" if len(ranks) in (1, pieces.view.world_size) else "compute"
    differ = "differ between the ranks" if apart else "are not those of the big batch"
    after = ", which differs between the ranks afterwards" if apart else ""
    lines = [
        at(place.line, f"changes {named(place.names)}{after}", True)
        for place in changes
        if set(place.names) & set(names)
    ]
    return Whereabouts(
        kind="own gradient",
        headline=f"buffers {differ}",
        sentence=f"{who[:1].upper()}{who[1:]} {verb} what its rows give with the buffers that it "
        f"has: {named(names)}. Before the forward pass, buffers {differ}.",
        lines=distinct(lines[:MOST_BUFFER_LINES]),
        ranks=ranks,
        fix="reduce these buffers over all ranks wherever a rank changes them.",
    )


def _is_of_buffers(pieces: Pieces, piece: Piece) -> bool:
    """True if the gradient of a piece is that of its rows, with the buffers of its rank."""
    if piece.rows is None or piece.forward is None or not piece.forward.buffers:
        return False
    generator = piece.forward.generator if pieces.view.setting.draws_on_cpu else b""
    found = pieces.view.examples.with_buffers(piece.rows, generator, piece.forward.buffers)
    return pieces.factor_between(piece.gradient, found.gradient) is not None
