"""Do the measured figures agree with the closed form, and with the published figures?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_equivalence.commands.sandbox import intervals
from ddp_equivalence.commands.sandbox.closed_form import ClosedForm
from ddp_equivalence.commands.sandbox.published import PublishedRow
from ddp_equivalence.commands.sandbox.training_result import TrainingResult

ROUNDING = 1e-12
"""The relative error that rounding may cause in sums of some thousand float64 numbers."""

WIDEST = 0.05
"""The largest half-width of a variance's interval, relative to the variance, that is narrow enough.
A variance that is wrong by a factor of 1.1 is then two half-widths away."""

MOST_CARRIED = 0.05
"""The largest share of the steps' variance that may come from the spread of the weight itself. The
interval of the variance treats all steps as independent, but steps that begin at the same weight
are not."""


@dataclass(frozen=True)
class Agreement:
    """Whether ``value`` lies between ``low`` and ``high``.

    ``what``: the name of the figure. ``holds`` is None if the closed form is not accurate enough
    here, and then ``why`` gives the reason.
    """

    what: str
    value: float
    low: float
    high: float
    holds: bool | None
    why: str = ""


def degrees(result: TrainingResult, expected: ClosedForm) -> float:
    """The degrees of freedom of the variance of the update steps."""
    return intervals.degrees_of_freedom(result.updates, expected.kurtosis)


def width(result: TrainingResult, expected: ClosedForm) -> float:
    """Half the width of the variance's interval, relative to the variance."""
    low, high = intervals.of_variance(1.0, degrees(result, expected))
    return (high - low) / 2


def with_closed_form(result: TrainingResult, expected: ClosedForm) -> tuple[Agreement, ...]:
    """Whether the closed form's w, variance and deviation lie in the intervals of those measured.

    Without noise they must be equal except for rounding. If the ranks never reduced their
    gradients, w and the variance still look right; only the deviation of w over the experiments is
    wrong.
    """
    if expected.deviation == 0.0:
        return (
            _equal("w", expected.w, result.w),
            _equal("variance", expected.variance, result.variance),
            _equal("deviation", 0.0, result.deviation),
        )
    interval = intervals.of_mean(result.w, result.deviation, result.experiments)
    inaccurate = _why_inaccurate(expected, (interval[1] - interval[0]) / 2)
    of_variance = intervals.of_variance(result.variance, degrees(result, expected))
    # w is a sum over the steps, so it is closer to normal than each of them.
    of_w = intervals.of_variance(result.deviation**2, result.experiments - 1)
    of_deviation = math.sqrt(of_w[0]), math.sqrt(of_w[1])
    return (
        _within("w", expected.w, interval, inaccurate),
        _within("variance", expected.variance, of_variance, inaccurate),
        _within("deviation", expected.deviation, of_deviation, inaccurate),
    )


def with_published(
    result: TrainingResult, expected: ClosedForm, row: PublishedRow
) -> tuple[Agreement, ...]:
    """Whether the published w and variance may come from the same distribution as those measured.

    The difference of the two means is normal, and the ratio of the two variances follows F. The
    interval of w is widened by the rounding of the published digits. The published standard
    deviation of w is not known, so the measured one is used for both; on the published side it is
    that of ranks that never reduced (``PublishedRow.spread``). Without noise all digits must be the
    same.
    """
    if expected.deviation == 0.0:
        same = f"{result.w:.{len(row.w) - 2}f}" == row.w
        return (
            Agreement("published w", float(row.w), result.w, result.w, same),
            _equal("published variance", float(row.variance), result.variance),
        )
    published = row.problem.n_experiments
    error = result.deviation * math.sqrt(1 / result.experiments + row.spread**2 / published)
    half = intervals.normal_quantile() * error + row.rounding
    published_degrees = intervals.degrees_of_freedom(
        published * row.problem.steps, expected.kurtosis
    )
    ratio = intervals.of_ratio(degrees(result, expected), published_degrees)
    of_variance = result.variance / ratio[1], result.variance / ratio[0]
    return (
        _within("published w", float(row.w), (result.w - half, result.w + half)),
        _within("published variance", float(row.variance), of_variance),
    )


def so_far_off(expected: ClosedForm, row: PublishedRow) -> tuple[float, float]:
    """How often a published w would be so far from the closed form, or farther: if ranks reduce
    their gradients, and if they never do. The rounding of its digits is taken off the distance.
    """
    far = max(0.0, abs(float(row.w) - expected.w) - row.rounding)
    error = expected.deviation / math.sqrt(row.problem.n_experiments)
    return intervals.beyond(far / error), intervals.beyond(far / (error * row.spread))


def _why_inaccurate(expected: ClosedForm, half: float) -> str:
    """Why the closed form is less accurate than the interval of w, of which ``half`` is half the
    width; "" if it is accurate enough.
    """
    if expected.curvature > half or expected.carried > MOST_CARRIED:
        return "the learning rate is too large for the closed form, which follows w to second order"
    return ""


def _within(
    what: str, value: float, interval: intervals.Interval, inaccurate: str = ""
) -> Agreement:
    low, high = interval
    holds = None if inaccurate else low <= value <= high
    return Agreement(what, value, low, high, holds, inaccurate)


def _equal(what: str, value: float, measured: float) -> Agreement:
    holds = math.isclose(value, measured, rel_tol=ROUNDING, abs_tol=ROUNDING**2)
    return Agreement(what, value, measured, measured, holds)
