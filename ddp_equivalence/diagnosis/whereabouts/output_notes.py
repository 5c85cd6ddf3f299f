"""How the call of a module whose output differs is unlike the same call in the replay."""

from __future__ import annotations

from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.diagnosis.whereabouts.replay import calls_of
from ddp_equivalence.measurement.trace import ModuleCall


def notes_of_output(pieces: Pieces, piece: Piece, here: ModuleCall, alone: ModuleCall) -> list[str]:
    """Other modes, types and shapes, as clauses. ``alone``: the call in the replay."""
    notes = []
    if here.training != alone.training:
        notes.append(f"it is in {_mode(here)} mode, and in {_mode(alone)} mode for the big batch")
    dtypes = _other_dtypes(pieces, piece, here)
    if dtypes:
        notes.append(dtypes)
    if here.returned and alone.returned and here.returned.shape != alone.returned.shape:
        notes.append(f"the shape is {here.returned.shape}, not {alone.returned.shape}")
    return notes


def _other_dtypes(pieces: Pieces, piece: Piece, call: ModuleCall) -> str:
    here = call.returned.dtype if call.returned else ""
    for of_rank in pieces.by_rank:
        for other_piece in of_rank[piece.number : piece.number + 1]:
            for other in calls_of(pieces, other_piece):
                there = other.returned.dtype if other.returned else ""
                if other.name == call.name and here and there and there != here:
                    return f"it is {here} here, and {there} on rank {other_piece.rank}"
    return ""


def _mode(call: ModuleCall) -> str:
    return "training" if call.training else "evaluation"
