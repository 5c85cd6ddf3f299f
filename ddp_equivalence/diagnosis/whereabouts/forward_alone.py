"""What the forward passes alone show, where the gradients of backward passes are not known."""

from __future__ import annotations

from dataclasses import replace

from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.gradient_path import line_of
from ddp_equivalence.diagnosis.whereabouts.own_gradient_fault import (
    SAME_LOSS,
    Compared,
    fault_of_own_gradient,
)
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces, pieces_of
from ddp_equivalence.diagnosis.whereabouts.rank_lines import lines_only_on
from ddp_equivalence.diagnosis.whereabouts.replay import first_difference
from ddp_equivalence.diagnosis.whereabouts.station_text import at
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    Whereabouts,
    distinct,
    not_seen,
    ranked,
)


def forward_alone(view: View) -> Whereabouts | None:
    """Compares modules and losses with those of the rows alone; None if that cannot be done.

    The gradients of sharded parameters, for instance, are not known before they are reduced.
    """
    pieces = pieces_of(view, without_gradients=True)
    if pieces is None or not pieces.all or pieces.is_coarse:
        return None
    wrong, known = [], 0
    for piece in pieces.all:
        alone = pieces.alone(piece)
        found = first_difference(pieces, piece) if alone is not None else None
        if alone is None or found is None:
            continue
        known += 1
        compared = Compared(piece, None, alone.gradient, alone.loss)
        factor = compared.loss_factor
        tolerance = max(SAME_LOSS, pieces.tolerance)
        if found.what != "none" or (factor is not None and abs(factor - 1) > tolerance):
            wrong.append(compared)
    unseen = "what backward computed on each rank, before it was reduced, was not recorded"
    if not wrong:
        if known < len(pieces.all):
            return None
        seen = "the modules and losses of all ranks are those of their rows"
        calls = [piece.call for piece in pieces.by_rank[0] if piece.call is not None]
        lines = distinct([at(line_of(call), "the loss is right here") for call in calls[:1]])
        return replace(not_seen(f"{seen}; {unseen}"), lines=lines)
    found_there = fault_of_own_gradient(pieces, wrong, "other outputs or losses")
    return replace(
        found_there,
        sentence=f"{found_there.sentence} It is not known whether this is all, since {unseen}.",
        parameters=(),
    )


def idle_ranks(pieces: Pieces) -> Whereabouts | None:
    """Ranks that were given rows and computed no gradient of their model; None if all did."""
    view = pieces.view
    shards = view.setting.shards
    if shards is None:
        return None
    idle = tuple(rank for rank, of_rank in enumerate(pieces.by_rank) if not of_rank)
    idle = tuple(rank for rank in idle if shards[rank])
    if not idle or len(idle) == view.world_size:
        return None
    who = ranked(idle, view.world_size)
    if all(view.observed.backwards(rank) for rank in idle):
        headline = "backward misses the model" if len(idle) == 1 else "backward misses their model"
        seen = "ran backward, and it reached no parameter of the model that the step was given."
        note = f"reaches no parameter of the model on {who}"
    else:
        headline = "no backward pass" if len(idle) == 1 else "no backward pass there"
        seen = "computed no gradient, though it was given rows."
        note = f"a backward pass, but not on {who}"
    last = next((line_of(one) for one in reversed(view.observed.calls.of(idle[0]))), None)
    return Whereabouts(
        "own gradient",
        f"{who}: {headline}",
        f"{who[:1].upper()}{who[1:]} {seen}",
        distinct(
            [
                *lines_only_on(view.observed.by_rank, idle),
                *(one.pointed(note) for one in view.observed.calls.backwards[:1]),
                at(last, f"the last recorded call of {who}"),
            ]
        ),
        view.parameters.names,
        idle,
    )
