"""What was worked out, held against what ranks were found to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isclose

from ddp_equivalence.commands.explain.arithmetic import Explanation, framework_divisor
from ddp_equivalence.commands.explain.measured import Measured
from ddp_equivalence.commands.explain.numbers import number
from ddp_equivalence.commands.explain.verified import Prediction

EXACT = 1e-9
"""Between two factors, relative: in float64 rounding stays below 1e-12."""
LITTLE = 1e-6
"""Unexplained: a difference of squares, of which rounding makes 1e-8. Unequal counts leave more
than 1e-2.
"""


@dataclass(frozen=True)
class Expected:
    """Every rank holds ``factor`` x g; where ``shares`` is not None, no multiple of g: each example
    (token) counts so often, and ``factor`` times on average.
    """

    factor: Fraction
    shares: tuple[Fraction, ...] | None


def expected(explanation: Explanation, counts: Sequence[int]) -> Expected:
    """``counts``: of every example of a step in the big batch's mean, one, or its tokens."""
    if explanation.is_multiple:
        return Expected(explanation.factor, None)
    if explanation.setup.loss == "token-mean":
        return Expected(explanation.factor, _shares_of_tokens(explanation, counts))
    setup = explanation.setup
    once = tuple(share for size, share in explanation.shares for _ in range(size))
    return Expected(explanation.factor, once * setup.accumulation * setup.processes)


def said(predicted: Expected) -> str:
    """What is expected, in words."""
    factor = f"{number(predicted.factor)} g"
    return factor if predicted.shares is None else f"no multiple of g, {factor} on average"


def judged(
    what: str, predicted: Expected, found: Measured, counts: Sequence[int] | None = None
) -> Prediction:
    """Every rank is held to it. ``counts``: as above, where it is to be no multiple of g."""
    wanted = said(predicted)
    if found.unexplained < LITTLE:
        held = f"{_by_rank(found.factors)} g"
        right = predicted.shares is None and _alike(found.factors, predicted.factor, EXACT)
        return Prediction(what, wanted, held, "agrees" if right else "differs")
    held = f"no multiple of g ({found.unexplained:.2g} of it unexplained)"
    if predicted.shares is None:
        return Prediction(what, wanted, held, "differs")
    if found.shares is None:
        why = f"How often each example counts could not be told: {found.why}."
        return Prediction(what, wanted, held, "unknown", why)
    weights = counts or [1] * len(predicted.shares)
    averages = tuple(
        sum(share * count for share, count in zip(row, weights, strict=True)) / sum(weights)
        for row in found.shares
    )
    right = _alike(averages, predicted.factor, LITTLE) and all(
        _alike((share,), exact, LITTLE)
        for row in found.shares
        for share, exact in zip(row, predicted.shares, strict=True)
    )
    held += f", {_by_rank(averages)} g on average; examples count {_range(found.shares)} times"
    held += ", each as predicted" if right else f", predicted {_range([predicted.shares])}"
    if found.unmixed >= LITTLE:
        held += f"; {found.unmixed:.2g} of it is of no example"
        right = False
    return Prediction(what, wanted, held, "agrees" if right else "differs")


def _shares_of_tokens(explanation: Explanation, counts: Sequence[int]) -> tuple[Fraction, ...]:
    """A token counts 1 / (its mean's tokens) over what divides after; in the big batch 1 / all."""
    setup, total = explanation.setup, sum(counts)
    accumulated = setup.accumulation if setup.accumulation_divided else 1
    after = len(setup.loss_sizes) * accumulated * framework_divisor(setup)
    shares: list[Fraction] = []
    for size in setup.loss_sizes * setup.accumulation * setup.processes:
        tokens = sum(counts[len(shares) : len(shares) + size])
        shares += [Fraction(total, tokens * after)] * size
    return tuple(shares)


def _alike(found: Sequence[float], wanted: Fraction, limit: float) -> bool:
    return all(isclose(one, wanted, rel_tol=limit) for one in found)


def _by_rank(values: Sequence[float]) -> str:
    said = [number(value) for value in values]
    return said[0] if len(set(said)) == 1 else f"{', '.join(said)} (by rank)"


def _range(rows: Sequence[Sequence[float | Fraction]]) -> str:
    values = [value for row in rows for value in row]
    return f"{number(float(min(values)))} to {number(float(max(values)))}"
