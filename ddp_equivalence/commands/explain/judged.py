"""Compare what was worked out with the gradients that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isclose

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.measured import Measured
from ddp_equivalence.commands.explain.numbers import number
from ddp_equivalence.commands.explain.setup import framework_divisor
from ddp_equivalence.commands.explain.verified import ComparedPrediction, VerificationOutcome

EXACT = 1e-9
"""The relative difference up to which two factors are the same. Rounding in float64 stays below
1e-12.
"""
LITTLE = 1e-6
"""The remainder up to which a gradient is a multiple of g. A remainder is the root of a difference
of squares, so rounding makes it up to 1e-8. Unequal counts leave more than 1e-2.
"""


@dataclass(frozen=True)
class ExpectedResult:
    """The gradient that every rank should hold.

    It is ``factor`` x g if ``shares`` is None. Otherwise it is no multiple of g: ``shares`` says
    how often each example (or token) counts, and ``factor`` is the average. ``unit``: the text
    calls the gradient of the mean loss times this number g.
    """

    factor: Fraction
    shares: tuple[Fraction, ...] | None
    unit: int = 1


def expected(explanation: Explanation, counts: Sequence[int]) -> ExpectedResult:
    """The gradient that every rank should hold.

    ``counts``: how much each example of a step weighs in the big batch's mean: 1, or its tokens.
    """
    if explanation.is_multiple:
        return ExpectedResult(explanation.factor, None, explanation.unit)
    if explanation.setup.loss == "token-mean":
        shares = _shares_of_tokens(explanation, counts)
        return ExpectedResult(explanation.factor, shares, explanation.unit)
    setup = explanation.setup
    of_micro_batch = tuple(share for size, share in explanation.shares for _ in range(size))
    shares = of_micro_batch * setup.accumulation * setup.processes
    return ExpectedResult(explanation.factor, shares, explanation.unit)


def expected_text(prediction: ExpectedResult) -> str:
    """The expected gradient in words."""
    factor = f"{number(prediction.factor / prediction.unit)} g"
    return factor if prediction.shares is None else f"no multiple of g, {factor} on average"


def judged(
    what: str, prediction: ExpectedResult, measured: Measured, counts: Sequence[int] | None = None
) -> ComparedPrediction:
    """Compare the gradient of every rank with the expected one.

    ``what``: the name of what is compared. ``counts``: as in ``expected``; needed if the expected
    gradient is no multiple of g.
    """
    wanted = expected_text(prediction)
    if measured.unexplained < LITTLE:
        holds = f"{_by_rank(measured.factors, prediction.unit)} g"
        right = prediction.shares is None and _alike(measured.factors, prediction.factor, EXACT)
        return ComparedPrediction(what, wanted, holds, _outcome(right))
    holds = f"no multiple of g ({measured.unexplained:.2g} of it unexplained)"
    if prediction.shares is None:
        return ComparedPrediction(what, wanted, holds, "differs")
    if measured.shares is None and measured.unmixed >= LITTLE:
        holds += f"; {measured.unmixed:.2g} of it comes from no example"
        return ComparedPrediction(what, wanted, holds, "differs")
    if measured.shares is None:
        why = f"It is unknown how often each example counts: {measured.why}."
        return ComparedPrediction(what, wanted, holds, "unknown", why)
    weights = counts or [1] * len(prediction.shares)
    averages = tuple(
        sum(share * count for share, count in zip(row, weights, strict=True)) / sum(weights)
        for row in measured.shares
    )
    right = _alike(averages, prediction.factor, LITTLE) and all(
        _alike((share,), exact, LITTLE)
        for row in measured.shares
        for share, exact in zip(row, prediction.shares, strict=True)
    )
    holds += f", {_by_rank(averages, prediction.unit)} g on average"
    holds += f"; examples count {_range(measured.shares)} times"
    holds += ", each as predicted" if right else f", predicted {_range([prediction.shares])}"
    if measured.unmixed >= LITTLE:
        holds += f"; {measured.unmixed:.2g} of it comes from no example"
        right = False
    return ComparedPrediction(what, wanted, holds, _outcome(right))


def _outcome(right: bool) -> VerificationOutcome:
    return "agrees" if right else "differs"


def _shares_of_tokens(explanation: Explanation, counts: Sequence[int]) -> tuple[Fraction, ...]:
    """How often the tokens of each example count.

    On a rank a token is divided by the tokens that are counted with it and by all later divisors;
    in the big batch it is divided by all tokens.
    """
    setup, total = explanation.setup, sum(counts)
    accumulated = setup.accumulation if setup.accumulation_divided else 1
    after = Fraction(len(setup.loss_sizes) * accumulated * framework_divisor(setup))
    after /= setup.loss_times.value(setup.processes)
    sizes = setup.loss_sizes * setup.accumulation * setup.processes
    if setup.tokens_over == "step":
        sizes = (setup.batch * setup.accumulation,) * setup.processes
    shares: list[Fraction] = []
    for size in sizes:
        tokens = sum(counts[len(shares) : len(shares) + size])
        shares += [total / (tokens * after)] * size
    return tuple(shares)


def _alike(values: Sequence[float], wanted: Fraction, limit: float) -> bool:
    return all(isclose(value, wanted, rel_tol=limit) for value in values)


def _by_rank(values: Sequence[float], unit: int) -> str:
    texts = [number(value / unit) for value in values]
    return texts[0] if len(set(texts)) == 1 else f"{', '.join(texts)} (by rank)"


def _range(rows: Sequence[Sequence[float | Fraction]]) -> str:
    values = [value for row in rows for value in row]
    return f"{number(float(min(values)))} to {number(float(max(values)))}"
