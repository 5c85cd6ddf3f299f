"""Scripts that clip each rank's own gradient, and reduce afterwards.

Before the clip nothing is reduced yet: what counts is then the gradient that the optimizer gets.
"""

from __future__ import annotations

from ddp_equivalence.observed_scripts.as_case import BEFORE_CLIP, HELD, OWN, Kind, ObservedStep
from ddp_equivalence.observed_scripts.gradient_sums import distance, rounding_of


def reduces_after_clipping(step: ObservedStep) -> bool:
    """True if every rank clips what it alone has computed, and all step with the same gradient."""
    ranks = range(step.record.world_size)
    if len(ranks) < 2 or not all(step.record.step(rank, step.number).clips for rank in ranks):
        return False
    if not all(_is_equal(step, (rank, BEFORE_CLIP), (rank, OWN)) for rank in ranks):
        return False
    others = ranks[1:]
    if all(_is_equal(step, (0, OWN), (rank, OWN)) for rank in others):
        return False  # then it cannot be told whether they are reduced
    return all(_is_equal(step, (0, HELD), (rank, HELD)) for rank in others)


def _is_equal(step: ObservedStep, one: tuple[int, Kind], other: tuple[int, Kind]) -> bool:
    first, second = step.gradients(*one), step.gradients(*other)
    return distance([(1.0, first), (-1.0, second)]) <= rounding_of(first)
