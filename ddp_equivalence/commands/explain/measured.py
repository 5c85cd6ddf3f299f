"""The gradients that ranks hold, as multiples of the big batch's: read from a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.report.verdict import Verdict


@dataclass(frozen=True)
class Measured:
    """The gradients that the ranks hold; g is the gradient of the big batch.

    ``factors``: for each rank the k for which k g is nearest to its gradient. ``unexplained``: the
    largest remainder of any rank, relative to the rank's gradient. ``shares``: for each rank how
    often each example (or token) counts; None if this is unknown for some, and ``why`` gives the
    reason. ``unmixed``: the largest part of any rank's gradient that the shares do not explain,
    relative to the gradient.
    """

    factors: tuple[float, ...]
    unexplained: float
    shares: tuple[tuple[float, ...], ...] | None
    why: str = ""
    unmixed: float = 0.0


def measured(verdict: Verdict) -> Measured | None:
    """The gradients that a verdict is about; None if nothing was compared."""
    comparison = verdict.comparison
    if comparison is None or comparison.structure or not comparison.parameters:
        return None
    fits = [_nearest(comparison, rank) for rank in comparison.ranks]
    shares, why = _shares(verdict)
    unmixed = verdict.why_no_shares.left_over if verdict.why_no_shares is not None else 0.0
    if verdict.shares is not None:
        unmixed = max(verdict.shares.unexplained.values())
    factors = tuple(factor for factor, _ in fits)
    return Measured(factors, max(rest for _, rest in fits), shares, why, unmixed)


def _nearest(comparison: Comparison, rank: int) -> tuple[float, float]:
    """The factor that fits all parameters of a rank best (least squares), and its remainder."""
    found = [
        (parameter.norm, one)
        for parameter in comparison.parameters
        for one in parameter.by_rank
        if one.rank == rank
    ]
    if any(not norm and one.error for norm, one in found):
        return math.nan, math.inf  # a gradient where the big batch has none
    found = [(norm, one) for norm, one in found if norm]
    factor = sum(one.factor * norm**2 for norm, one in found) / sum(norm**2 for norm, _ in found)
    squares = sum((one.ratio * norm) ** 2 for norm, one in found)
    # The remainder of each parameter, plus what one factor for all parameters adds to it.
    rest = sum(
        (one.unexplained * one.ratio * norm) ** 2 + ((one.factor - factor) * norm) ** 2
        for norm, one in found
    )
    return factor, math.sqrt(rest / squares) if squares else 0.0


def _shares(verdict: Verdict) -> tuple[tuple[tuple[float, ...], ...] | None, str]:
    """How often every example counts on every rank; or None and the reason."""
    shares = verdict.shares
    if shares is None:
        return None, verdict.why_no_shares.reason if verdict.why_no_shares else ""
    if shares.by_example is None:
        return None, shares.why_not_examples
    rows = [shares.by_example[rank] for rank in sorted(shares.by_example)]
    known = tuple(tuple(one for one in row if one is not None) for row in rows)
    if any(len(found) < len(row) for found, row in zip(known, rows, strict=True)):
        return None, "some examples have no gradient of their own"
    return known, ""
