"""The figures of the sandbox beside the closed form and the published table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from scipy import stats

from ddp_equivalence.commands.sandbox.training import (
    ClosedForm,
    Problem,
    TrainingResult,
    closed_form,
    train,
)

LEVEL = 0.999
"""The confidence level of all intervals, which are two-sided. They take the update steps to be
normally distributed, which they nearly are: their excess kurtosis is -0.13 / batch."""

TAIL = (1 - LEVEL) / 2
QUANTILE = float(stats.norm.ppf(1 - TAIL))

ROUNDING = 1e-12
"""The relative error that rounding may cause in sums of some thousand float64 numbers."""


@dataclass(frozen=True)
class Agreement:
    """A figure ``value`` that must lie between ``low`` and ``high``, which were measured."""

    what: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        slack = ROUNDING * abs(self.value) + ROUNDING**2
        return self.low - slack <= self.value <= self.high + slack


def interval_of_variance(variance: float, count: int) -> tuple[float, float]:
    """The interval of the true variance, from the variance of a sample of ``count``."""
    largest, smallest = stats.chi2.ppf((1 - TAIL, TAIL), count - 1)
    return float(variance * (count - 1) / largest), float(variance * (count - 1) / smallest)


def with_closed_form(result: TrainingResult, expected: ClosedForm) -> tuple[Agreement, ...]:
    """Whether the closed form's w, variance and deviation lie in the intervals of those measured.

    Without noise they must be equal except for rounding. If the ranks never reduced their
    gradients, w and the variance still look right; only the deviation of w over the experiments is
    wrong.
    """
    count, noise = result.weights.shape[1], expected.deviation > 0
    half = QUANTILE * result.deviation / math.sqrt(count)
    of_variance, of_deviation = (result.variance,) * 2, (result.deviation,) * 2
    if noise:
        of_variance = interval_of_variance(result.variance, result.steps.size)
        low, high = interval_of_variance(result.deviation**2, count)
        of_deviation = math.sqrt(low), math.sqrt(high)
    return (
        Agreement("w", expected.w, result.w - half, result.w + half),
        Agreement("variance", expected.variance, *of_variance),
        Agreement("deviation", expected.deviation, *of_deviation),
    )


# The nine published rows, with the digits that were printed.

RANKS = 8

EXPERIMENTS = 10_000
"""How many experiments with noise are run for a row: with the published 1,000, the interval of the
variance is too wide to exclude a factor of 1.1."""


@dataclass(frozen=True)
class PublishedRow:
    """One published run: ``w`` after an epoch and the ``variance`` of the steps, as printed, for
    a number of ``experiments``; the problem is what is run here.
    """

    problem: Problem
    experiments: int
    w: str
    variance: str


ROWS = tuple(
    PublishedRow(
        Problem(
            lr=lr,
            batch_size=batch,
            ranks=ranks,
            deterministic=experiments == 1,
            n_experiments=1 if experiments == 1 else EXPERIMENTS,
        ),
        *(experiments, w, variance),
    )
    for ranks, lr, batch, experiments, w, variance in (
        (1, 1e-3, 128, 1, "0.9980", "0"),
        (RANKS, 1e-3, 16, 1, "0.9980", "0"),
        (1, 1e-3, 128, 10_000, "0.9981", "8.3733e-09"),
        (RANKS, 1e-3, 16, 10_000, "0.9981", "8.4037e-09"),
        (1, 1e-3, 16, 1, "0.9840", "0"),
        (RANKS, 8e-3, 16, 1, "0.9840", "0"),
        (1, 1e-3, 16, 1_000, "0.9847", "6.7332e-08"),
        (RANKS, 8e-3, 16, 1_000, "0.9848", "5.5736e-07"),
        (RANKS, 2.8284e-3, 16, 1_000, "0.9946", "6.5220e-08"),
    )
)
"""The rows in their published order. Rows with one experiment have no noise."""


def with_published(result: TrainingResult, row: PublishedRow) -> tuple[Agreement, ...]:
    """Whether the published w and variance may come from the same distribution as those measured.

    The difference of the two means is normal, and the ratio of the two variances follows F. The
    interval of w is widened by the rounding of the published digits. The published standard
    deviation of w is not known, so the measured one is used for both. The published script never
    reduced, so each of its w is that of one rank, and scatters as one that saw only its examples.
    Without noise the variances must be the same.
    """
    count, problem = result.weights.shape[1], row.problem
    error = result.deviation * math.sqrt(1 / count + problem.ranks / row.experiments)
    half = QUANTILE * error + 0.5 * 10.0 ** -len(row.w.partition(".")[2])
    low = high = 1.0
    if not problem.deterministic:
        sizes = result.steps.size - 1, row.experiments * problem.steps - 1
        low, high = map(float, stats.f.ppf((TAIL, 1 - TAIL), *sizes))
    variances = result.variance / high, result.variance / low
    return (
        Agreement("published w", float(row.w), result.w - half, result.w + half),
        Agreement("published variance", float(row.variance), *variances),
    )


@dataclass(frozen=True)
class FinishedRun:
    """One run, and what was measured and computed for it; ``row``: None if not published."""

    problem: Problem
    row: PublishedRow | None
    result: TrainingResult
    expected: ClosedForm
    agreements: tuple[Agreement, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The figures that do not agree."""
        names = tuple(one.what for one in self.agreements if not one.holds)
        return (*names, "ranks differ") if self.result.spreads.any() else names


def run_problem(
    problem: Problem, row: PublishedRow | None = None, as_published: bool = False
) -> FinishedRun:
    """Train, and compare with the closed form and with a published row, if there is one.

    Raises RankFailed or RanksTimedOut.
    """
    result, expected = train(problem, as_published), closed_form(problem)
    agreements = with_closed_form(result, expected)
    if row is not None:
        agreements += with_published(result, row)
    return FinishedRun(problem, row, result, expected, agreements)


HEAD = (
    f"{'':<30}{'w after the last epoch':^28}{'variance of the update steps':^34}\n"
    f"{'run':<7}{'lr':<10}{'batch':<7}{'exps':>6}{'published':>10}{'measured':>10}{'closed':>9}"
    f"{'published':>12}{'measured':>11}{'closed':>11}"
)


def run_lines(run: FinishedRun) -> Iterator[str]:
    """The figures of one run, and which of them do not agree."""
    problem, result, expected, row = run.problem, run.result, run.expected, run.row
    mode, batch = "single", str(problem.batch_size)
    if problem.ranks > 1:
        mode, batch = "multi", f"{batch} x {problem.ranks}"
    yield (
        f"{mode:<7}{problem.lr:<10g}{batch:<7}{problem.n_experiments:>6}"
        f"{row.w if row else '':>10}{result.w:>10.5f}{expected.w:>9.5f}"
        f"{row.variance if row else '':>12}{_figure(result.variance):>11}"
        f"{_figure(expected.variance):>11}  "
        f"{'DIFFER' if run.wrong else 'agree'}"
    )
    for one in run.agreements:
        if one.what in run.wrong:
            yield f"  {one.what}: {one.value:.4e} is not in {one.low:.4e} .. {one.high:.4e}"
    apart = result.spreads
    if apart.any():
        yield (
            f"  the ranks hold DIFFERENT weights at the end, in {(apart > 0).mean():.1%} of the "
            f"experiments: up to {apart.max():.2e} apart"
        )


def _figure(variance: float) -> str:
    """The number as text; "0" if it is so small that it is only rounding."""
    return "0" if variance < 1e-24 else f"{variance:.4e}"
