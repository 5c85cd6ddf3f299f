"""What ranks were found to hold, in gradients of the big batch: from a verdict's public data."""

from __future__ import annotations

import math
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
    found = [
        (parameter.norm, one)
        for parameter in comparison.parameters
        for one in parameter.by_rank
        if one.rank == rank
    ]
    if any(not norm and one.error for norm, one in found):
        return math.nan, math.inf  # something where the big batch has nothing
    found = [(norm, one) for norm, one in found if norm]
    factor = sum(one.factor * norm**2 for norm, one in found) / sum(norm**2 for norm, _ in found)
    squares = sum((one.ratio * norm) ** 2 for norm, one in found)
    # The rests of the single parameters, and what one factor for all leaves beyond them.
    rest = sum(
        (one.unexplained * one.ratio * norm) ** 2 + ((one.factor - factor) * norm) ** 2
        for norm, one in found
    )
    return factor, math.sqrt(rest / squares) if squares else 0.0


def _average(verdict: Verdict, counts: Sequence[int]) -> float | None:
    shares = verdict.shares
    if shares is None or not shares.by_example:
        return None
    row = shares.by_example[min(shares.by_example)]
    known = [(share, n) for share, n in zip(row, counts, strict=True) if share is not None]
    if len(known) < len(counts):
        return None
    return sum(share * n for share, n in known) / sum(counts)
