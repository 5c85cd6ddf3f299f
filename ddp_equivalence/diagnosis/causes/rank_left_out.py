"""What some ranks computed is in nobody's gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Way
from ddp_equivalence.diagnosis.view import View

NOTHING = 1e-3
"""A weight below this, against the largest, is none: it says which ranks are tried."""


def predict(view: View) -> Sequence[Way]:
    # All ranks of a node have a name of their own.
    nodes = [view.layout.ranks_on(node) for node in range(view.layout.nodes)]
    whole = [ranks for ranks in nodes if len(ranks) > 1 and view.layout.nodes > 1]
    left_out = [ranks for ranks in candidates(view) if ranks not in whole]
    return tuple(way for ranks in left_out for way in without(view, ranks))


def candidates(view: View) -> list[tuple[int, ...]]:
    """The ranks whose weight is zero on the ranks that hold others' gradients; else each rank."""
    weights = view.weights
    each: list[tuple[int, ...]] = [(rank,) for rank in range(view.world_size)]
    if weights is None or view.world_size == 1:
        return each if view.world_size > 1 else []
    found = []
    for row in weights:
        size = row.abs()
        zeros = tuple(torch.nonzero(size < NOTHING * size.max()).flatten().tolist())
        if 0 < len(zeros) < view.world_size:
            found.append(zeros)
    return list(dict.fromkeys(found))


def without(view: View, ranks: tuple[int, ...]) -> Iterator[Way]:
    """The mean or the sum of the others; those left out hold the same, or their own."""
    for own in view.owns:
        yield from _without(view, ranks, own)


def _without(view: View, ranks: tuple[int, ...], own: Tensor) -> Iterator[Way]:
    if not bool(own[list(ranks)].any()):
        return  # they bring nothing anyway
    others = [rank for rank in range(view.world_size) if rank not in ranks]
    total = own[others].sum(0)
    name = indications.listed(ranks)
    divisors: dict[int, str] = {
        view.world_size: f"{name}; the divisor counts all {view.world_size}",
        len(others): f"{name}; the divisor counts the other {len(others)}",
    }
    if view.is_sum():
        divisors[1] = name
    for divisor, detail in divisors.items():
        held = total / divisor
        yield Way(view.everywhere(held), detail)
        # Of one that is left, everybody would hold his own: another cause.
        if len(view.ranks) == view.world_size and len(others) > 1:
            yield Way(_own_for(ranks, held, own), f"{detail}; what they hold is their own")


def _own_for(ranks: tuple[int, ...], held: Tensor, found: Tensor) -> Tensor:
    rows = held.expand(len(found), -1).clone()
    rows[list(ranks)] = found[list(ranks)]
    return rows


HYPOTHESIS = Hypothesis(
    name="rank_left_out",
    sentence="What a rank computed is in no other rank's gradient.",
    look_at="the process group that gradients are reduced in, and early returns before all_reduce",
    predict=predict,
    tell_apart="more than one rank on every node",
)
