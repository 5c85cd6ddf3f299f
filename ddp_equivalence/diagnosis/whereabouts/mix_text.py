"""A mixture of the ranks' own gradients, in words."""

from __future__ import annotations

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.whereabouts.gradient_mix import SAME_WEIGHT, Mix
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import ranked

MOST_RANKS = 6


def mix_text(mix: Mix | None, pieces: Pieces) -> str:
    """The mixture as a noun phrase: ``the mean of the ranks' own gradients``."""
    if mix is None:
        return "no mixture of the ranks' own gradients"
    of = f" of {mix.of[0]}" if mix.of else ""
    most = float(mix.weights.abs().max()) if len(mix.weights) else 0.0
    if not most:
        return "zero"
    weight = mix.uniform
    world_size = pieces.view.world_size
    if weight is not None:
        return _of_all_ranks(weight, world_size, of)
    by_rank: dict[int, set[float]] = {}
    for piece, one in zip(pieces.all, mix.weights.tolist(), strict=True):
        by_rank.setdefault(piece.rank, set()).add(0.0 if abs(one) <= SAME_WEIGHT * most else one)
    flat = {
        rank: weights.pop() if max(weights) - min(weights) <= SAME_WEIGHT * most else None
        for rank, weights in by_rank.items()
    }
    if None in flat.values():
        return f"a mixture of the own gradients{of} in which backward passes count differently"
    counted = [rank for rank, one in flat.items() if one]
    values = [one for one in flat.values() if one]
    if max(values) - min(values) <= SAME_WEIGHT * most:
        what = "the own gradient" if len(counted) == 1 else "the sum of the own gradients"
        times = "" if abs(values[0] - 1) <= SAME_WEIGHT else f"{text_of(values[0], '.4g')} times "
        return f"{times}{what}{of} of {ranked(counted, world_size)}"
    shown = [
        f"rank {rank} {text_of(one or 0.0, '.4g')}" for rank, one in list(flat.items())[:MOST_RANKS]
    ]
    more = ", ..." if len(flat) > MOST_RANKS else ""
    return f"a mixture of the own gradients{of} with these weights: {', '.join(shown)}{more}"


def _of_all_ranks(weight: float, world_size: int, of: str) -> str:
    if world_size == 1:
        return f"{text_of(weight, '.4g')} times what backward computed{of}"
    for value, what in ((1 / world_size, "mean"), (1.0, "sum")):
        if abs(weight - value) <= SAME_WEIGHT * value:
            return f"the {what} of the ranks' own gradients{of}"
    return f"{text_of(weight, '.4g')} times the sum of the ranks' own gradients{of}"
