"""Scripts that clip each rank's own gradient, and reduce afterwards.

Before the clip nothing is reduced yet: what counts is then the gradient that the optimizer gets.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.observed_scripts.as_case import BEFORE_CLIP, HELD, OWN, Kind, ObservedStep
from ddp_equivalence.observed_scripts.differences_between_ranks import lines_at
from ddp_equivalence.observed_scripts.gradient_sums import distance, rounding_of

NAME = "clipped_before_reduce"

ADDED_BY_TORCH = 1e-6
"""``clip_grad_norm_`` divides the limit by the norm plus this."""


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


def clipped_own_gradients(step: ObservedStep) -> Iterator[Finding]:
    """The finding, if each rank steps with the mean of the ranks' own clipped gradients."""
    ranks = range(step.record.world_size)
    clips = [step.record.step(rank, step.number).clips for rank in ranks]
    if any(len(of_rank) != 1 for of_rank in clips) or not reduces_after_clipping(step):
        return
    seen = [of_rank[0] for of_rank in clips]
    if not any(one.changed for one in seen):
        return
    factors = [one.limit / (one.norm + ADDED_BY_TORCH) if one.changed else 1.0 for one in seen]
    mean = [(-f / len(ranks), step.gradients(rank, OWN)) for rank, f in enumerate(factors)]
    held = step.gradients(0, HELD)
    left = distance([(1.0, held), *mean])
    if left > rounding_of(held):
        return
    norms = ", ".join(text_of(one.norm, ".3g") for one in seen)
    yield Finding(
        cause=NAME,
        sentence="Each rank clips its own gradient, and the clipped gradients are averaged",
        look_at="the order of the clip and the reduction",
        unexplained=left,
        accepted=True,
        fits=True,
        headline="each rank clips its own gradient before the reduction",
        because=f"the ranks' own norms are {norms}, and the ranks hold the mean of what is left",
        fix="reduce the gradients first, then clip on every rank by the norm of the mean.",
        lines=lines_at(
            seen[0].place,
            f"clips to {text_of(seen[0].limit, '.3g')} before the reduction; norms: {norms}",
        ),
    )
