"""What ranks were found to hold, in gradients of the big batch: from a verdict's public data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_equivalence.comparison import Comparison
from ddp_equivalence.verdict import Verdict


@dataclass(frozen=True)
class Measured:
    """``factor``: the k for which k g is nearest to what the rank holds that is furthest from it;
    ``unexplained``: what that leaves, relative to what the rank holds. ``average``: how often an
    example (token) counts on average; None if it could not be told.
    """

    factor: float
    unexplained: float
    average: float | None


def measured(verdict: Verdict, counts: Sequence[int]) -> Measured | None:
    """None where nothing was compared. ``counts``: of every example, in the big batch's mean."""
    comparison = verdict.comparison
    if comparison is None or comparison.structure or not comparison.parameters:
        return None
    fits = [_nearest(comparison, rank) for rank in comparison.ranks]
    factor, unexplained = max(fits, key=lambda fit: fit[1])
    return Measured(factor, unexplained, _average(verdict, counts))


def _nearest(comparison: Comparison, rank: int) -> tuple[float, float]:
    """One factor for all parameters of a rank, by least squares, and what it leaves."""
    product = truth = squares = 0.0
    for parameter in comparison.parameters:
        found = next(one for one in parameter.by_rank if one.rank == rank)
        product += found.factor * parameter.norm**2
        truth += parameter.norm**2
        squares += (found.ratio * parameter.norm) ** 2
    factor = product / truth
    # The rests of the single parameters, and what one factor for all leaves beyond them.
    rest = sum(
        (found.unexplained * found.ratio * parameter.norm) ** 2
        + ((found.factor - factor) * parameter.norm) ** 2
        for parameter in comparison.parameters
        for found in parameter.by_rank
        if found.rank == rank
    )
    return factor, (rest / squares) ** 0.5 if squares else 0.0


def _average(verdict: Verdict, counts: Sequence[int]) -> float | None:
    shares = verdict.shares
    if shares is None or not shares.by_example:
        return None
    row = shares.by_example[min(shares.by_example)]
    known = [(share, n) for share, n in zip(row, counts, strict=True) if share is not None]
    if len(known) < len(counts):
        return None
    return sum(share * n for share, n in known) / sum(counts)
