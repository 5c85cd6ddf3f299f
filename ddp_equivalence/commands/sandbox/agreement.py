"""Does what was measured agree with the closed form, and with what was published?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_equivalence.commands.sandbox import intervals
from ddp_equivalence.commands.sandbox.closed_form import ClosedForm
from ddp_equivalence.commands.sandbox.outcome import Outcome
from ddp_equivalence.commands.sandbox.published import Row

ROUNDING = 1e-12
"""Relative: what sums of some thousand float64 may lose."""

WIDEST = 0.05
"""Of a variance's interval, on either side: a factor of 1.1 is then two such widths away."""

MOST_CARRIED = 0.05
"""Of the steps' variance that the weight's own spread may add: steps that share a weight are not
independent."""


@dataclass(frozen=True)
class Agreement:
    """``value`` is held against ``low`` to ``high``; ``holds`` is None where the closed form does
    not reach that far, and then ``why`` says so.
    """

    what: str
    value: float
    low: float
    high: float
    holds: bool | None
    why: str = ""


def degrees(outcome: Outcome, expected: ClosedForm) -> float:
    """Degrees of freedom of the variance of the update steps."""
    return intervals.degrees_of_freedom(outcome.updates, expected.kurtosis)


def width(outcome: Outcome, expected: ClosedForm) -> float:
    """Half the interval of the variance, relative to it."""
    low, high = intervals.of_variance(1.0, degrees(outcome, expected))
    return (high - low) / 2


def with_closed_form(outcome: Outcome, expected: ClosedForm) -> tuple[Agreement, ...]:
    """The closed form's mean, variance and deviation in the intervals of what was measured.

    Without noise they must be the same but for rounding. The deviation of w over the experiments is
    what tells a run in which the ranks do not reduce, where mean and variance look right.
    """
    if expected.deviation == 0.0:
        return (
            _equal("w", expected.w, outcome.w),
            _equal("variance", expected.variance, outcome.variance),
            _equal("deviation", 0.0, outcome.deviation),
        )
    interval = intervals.of_mean(outcome.w, outcome.deviation, outcome.experiments)
    beyond = _beyond(expected, (interval[1] - interval[0]) / 2)
    of_variance = intervals.of_variance(outcome.variance, degrees(outcome, expected))
    # w is a sum over the steps, and nearer to normal than each of them.
    of_w = intervals.of_variance(outcome.deviation**2, outcome.experiments - 1)
    of_deviation = math.sqrt(of_w[0]), math.sqrt(of_w[1])
    return (
        _within("w", expected.w, interval, beyond),
        _within("variance", expected.variance, of_variance, beyond),
        _within("deviation", expected.deviation, of_deviation, beyond),
    )


def with_published(outcome: Outcome, expected: ClosedForm, row: Row) -> tuple[Agreement, ...]:
    """Two samples: the difference of their means is normal, the ratio of their variances F.

    The published w is rounded more coarsely than its own error, which is allowed for. Its spread
    over the experiments was not published; ours stands for it. Without noise all digits must be the
    same.
    """
    if expected.deviation == 0.0:
        same = f"{outcome.w:.{len(row.w) - 2}f}" == row.w
        return (
            Agreement("published w", float(row.w), outcome.w, outcome.w, same),
            _equal("published variance", float(row.variance), outcome.variance),
        )
    published = row.setup.n_experiments
    error = outcome.deviation * math.sqrt(1 / outcome.experiments + 1 / published)
    half = intervals.normal_quantile() * error + row.rounding
    theirs = intervals.degrees_of_freedom(published * row.setup.steps, expected.kurtosis)
    ratio = intervals.of_ratio(degrees(outcome, expected), theirs)
    of_variance = outcome.variance / ratio[1], outcome.variance / ratio[0]
    return (
        _within("published w", float(row.w), (outcome.w - half, outcome.w + half)),
        _within("published variance", float(row.variance), of_variance),
    )


def _beyond(expected: ClosedForm, half: float) -> str:
    """Why the closed form does not reach so far; "" if it does."""
    if expected.curvature > half or expected.carried > MOST_CARRIED:
        return "the learning rate is too large for the closed form: it follows w to second order"
    return ""


def _within(what: str, value: float, interval: intervals.Interval, beyond: str = "") -> Agreement:
    low, high = interval
    return Agreement(what, value, low, high, None if beyond else low <= value <= high, beyond)


def _equal(what: str, value: float, measured: float) -> Agreement:
    holds = math.isclose(value, measured, rel_tol=ROUNDING, abs_tol=ROUNDING**2)
    return Agreement(what, value, measured, measured, holds)
