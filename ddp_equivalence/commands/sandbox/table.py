"""The published table beside what was measured, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any

from scipy import stats

from ddp_equivalence.commands.sandbox.training import (
    SAMPLES,
    ClosedForm,
    Problem,
    Progress,
    TrainingResult,
    closed_form,
    train,
)
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.text import plural

# The table of the nine published rows: what was published, what was measured, the closed form,
# and whether they agree.

MORE_EXPERIMENTS = 10_000
"""How many experiments a row's second run has. It is compared with the closed form only, and is
made if the published number of experiments is too small."""


@dataclass(frozen=True)
class RowRun:
    """One run of a row, with one number of experiments."""

    problem: Problem
    result: TrainingResult
    expected: ClosedForm
    agreements: tuple[Agreement, ...]

    @property
    def width(self) -> float:
        """Half the width of the variance's interval, relative to the variance; 0 without noise."""
        if self.problem.deterministic:
            return 0.0
        return width_of_names(self.result, self.expected)


@dataclass(frozen=True)
class FinishedRow:
    """A published row and its runs.

    The first run has the published number of experiments. If that number is too small, there is a
    second run with more.
    """

    row: PublishedRow
    runs: tuple[RowRun, ...]

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        return tuple(agreement for run in self.runs for agreement in run.agreements)

    @property
    def spread(self) -> float:
        """The largest difference between ranks; 0 if all hold the same bits."""
        return max(run.result.spread for run in self.runs)

    @property
    def wrong(self) -> tuple[str, ...]:
        """The names of the figures that do not agree."""
        names = tuple(one.what for one in self.agreements if one.holds is not True)
        return (*names, "ranks differ") if self.spread else names


def run_row(row: PublishedRow, progress: Progress = lambda done, of: None) -> FinishedRow:
    """Run a row. Raises RankFailed or RanksTimedOut."""
    first = _run(row.problem, row, progress)
    if first.width <= WIDEST:
        return FinishedRow(row, (first,))
    count = max(MORE_EXPERIMENTS, row.problem.n_experiments)
    more = replace(row.problem, n_experiments=count)
    return FinishedRow(row, (first, _run(more, None, progress)))


def _run(problem: Problem, row: PublishedRow | None, progress: Progress) -> RowRun:
    result, expected = train(problem, progress=progress), closed_form(problem)
    agreements = with_closed_form(result, expected)
    if row is not None:
        agreements += with_published(result, expected, row)
    return RowRun(problem, result, expected, agreements)


def head_lines() -> Iterator[str]:
    """The two lines above the rows."""
    yield f"{'':<30}{'w after one epoch':^28}{'variance of the update steps':^34}".rstrip()
    yield (
        f"{'run':<7}{'lr':<10}{'batch':<7}{'exps':>6}{'published':>10}{'measured':>10}{'closed':>9}"
        f"{'published':>12}{'measured':>11}{'closed':>11}"
    )


def row_lines(finished: FinishedRow) -> Iterator[str]:
    """The lines of one row: its figures, and the intervals that they were compared with."""
    for number, run in enumerate(finished.runs):
        yield _figures(finished, run, first=number == 0)
        if not run.problem.deterministic:
            yield from _intervals(run, first=number == 0)
            if number == 0 and finished.row.mode == "multi":
                yield f"       {_chances(run.expected, finished.row)}"
    if finished.wrong:
        yield f"       does not agree: {', '.join(finished.wrong)}"


def _figures(finished: FinishedRow, run: RowRun, first: bool) -> str:
    row, problem, result, expected = finished.row, run.problem, run.result, run.expected
    batch = str(problem.batch_size)
    if problem.ranks > 1:
        batch += f" x {problem.ranks}"
    what = (
        f"{row.mode:<7}{problem.lr:<10g}{batch:<7}" if first else f"{'':<7}{'more experiments':<17}"
    )
    published = (row.w, row.variance) if first else ("", "")
    verdict = ("DIFFER" if finished.wrong else "agree") if first else ""
    line = (
        f"{what}{problem.n_experiments:>6}{published[0]:>10}{result.w:>10.5f}{expected.w:>9.5f}"
        f"{published[1]:>12}{figure(result.variance, '.4e'):>11}"
        f"{figure(expected.variance, '.4e'):>11}  {verdict}"
    )
    return line.rstrip()


def _intervals(run: RowRun, first: bool) -> Iterator[str]:
    by_name = {agreement.what: agreement for agreement in run.agreements}
    w, variance = by_name["w"], by_name["variance"]
    text = (
        f"       w ± {(w.high - w.low) / 2:.1e}, variance {variance.low:.4e} .. "
        f"{variance.high:.4e} (± {run.width:.1%})"
    )
    too_wide = ": too wide to exclude a factor of 1.1" if run.width > WIDEST else ""
    yield text + too_wide
    if first:
        ratio = by_name["published variance"]
        low, here, high = (
            value / run.result.variance for value in (ratio.low, ratio.value, ratio.high)
        )
        yield f"       published / measured variance {here:.3f}, allowed {low:.3f} .. {high:.3f}"


def _chances(expected: ClosedForm, row: PublishedRow) -> str:
    """How far off the published w is, as p-values, and what they say of the published script."""
    reduced, never = so_far_off(expected, row)
    if reduced == never == 1:
        return "published w: as near as its four digits allow, whether ranks reduce or not"
    chances = f"{text_of(100 * reduced, '.3g')} % of runs are as far off if ranks reduce, "
    return f"published w: {chances}{text_of(100 * never, '.3g')} % if not (p-values)"


def foot_lines(rows: Sequence[FinishedRow]) -> Iterator[str]:
    """The lines below the rows: how to read them, and how many agree."""
    wrong = [row for row in rows if row.wrong]
    kurtosis = {
        run.problem.effective_batch: run.expected.kurtosis
        for row in rows
        for run in row.runs
        if not run.problem.deterministic
    }
    if kurtosis:
        values = ", ".join(
            f"{value:+.4f} at batch {batch}" for batch, value in sorted(kurtosis.items())
        )
        yield "The intervals are for update steps that are nearly normally distributed. These are:"
        yield f"excess kurtosis {values} (closed form)."
        yield "Rows with the same effective batch and learning rate are given the same noise."
    yield f"Intervals: {LEVEL:.1%}. multi: DistributedDataParallel on {RANKS} ranks (gloo, CPU)."
    yield f"{len(rows) - len(wrong)} of {len(ROWS)} published rows agree."


def as_json(rows: Sequence[FinishedRow], seed: int, interrupted: bool) -> dict[str, Any]:
    """The rows that were run, as values that can be written as JSON."""
    return {
        "source": SOURCE,
        "seed": seed,
        "rows_published": len(ROWS),
        "rows_done": len(rows),
        "interrupted": interrupted,
        "rows": [_row_as_json(row) for row in rows],
    }


def _row_as_json(finished: FinishedRow) -> dict[str, Any]:
    return {
        "run": finished.row.mode,
        "published": {"w": float(finished.row.w), "variance": float(finished.row.variance)},
        "agree": not finished.wrong,
        "disagree": list(finished.wrong),
        "spread_over_ranks": finished.spread,
        "parts": [
            {
                "setup": asdict(run.problem),
                "measured": {"w": run.result.w, "variance": run.result.variance},
                "closed_form": {"w": run.expected.w, "variance": run.expected.variance},
                "agreements": [asdict(agreement) for agreement in run.agreements],
            }
            for run in finished.runs
        ],
    }


# What one run of the sandbox prints.


def title(problem: Problem, as_published: bool) -> str:
    """What is run, in two lines."""
    if problem.ranks == 1:
        batch, where = f"batch {problem.batch_size}", "one process"
    else:
        batch = f"batch {problem.batch_size} x {problem.ranks} = {problem.effective_batch}"
        called = "as published: the bare net is called" if as_published else "the wrapper is called"
        where = f"{problem.ranks} ranks, gloo, CPU, DistributedDataParallel ({called})"
    epochs = f"{problem.n_epochs} {plural(problem.n_epochs, 'epoch')} of {SAMPLES} samples"
    noise = "no noise" if problem.deterministic else f"noise of seed {problem.seed}"
    return (
        f"{where}\n{batch}, lr {problem.lr:g}, {epochs}: {problem.steps} "
        f"{plural(problem.steps, 'step')}; {problem.n_experiments:,} "
        f"{plural(problem.n_experiments, 'experiment')}, {noise}"
    )


def result_lines(
    problem: Problem,
    result: TrainingResult,
    expected: ClosedForm,
    agreements: Sequence[Agreement],
) -> Iterator[str]:
    """The measured figures beside the closed form, and whether they agree."""
    of_w, of_variance, of_deviation = agreements
    head = "" if problem.deterministic else f"{LEVEL:.1%} interval"
    yield f"{'':<28}{'measured':>12}{head:>28}{'closed form':>14}"
    yield _figure_line("w after the run, mean", result.w, of_w, ".6f")
    yield _figure_line("variance of all update steps", result.variance, of_variance, ".4e")
    if not problem.deterministic:
        yield _figure_line("deviation of w", result.deviation, of_deviation, ".4e")
        yield (
            f"an update step is nearly normal: excess kurtosis {expected.kurtosis:+.4f}, for which "
            "the variance's interval allows"
        )
    for why in dict.fromkeys(agreement.why for agreement in agreements if agreement.why):
        yield f"not judged: {why}"


def spread_lines(problem: Problem, result: TrainingResult) -> Iterator[str]:
    """Whether the ranks hold the same weights at the end."""
    if result.spread == 0.0:
        yield f"all {problem.ranks} ranks hold the same weights at the end, bit for bit"
        if problem.deterministic:
            yield "  but this shows nothing: without noise all ranks see the same examples"
        return
    apart = float((result.spreads > 0).mean())
    typical = math.sqrt(float(result.weights.var(axis=0, ddof=1).mean()))
    yield (
        f"the ranks hold DIFFERENT weights at the end, in {apart:.1%} of the experiments: up to "
        f"{result.spread:.2e} apart"
    )
    yield (
        f"  the standard deviation over the ranks is {typical:.2e}; the mean weight, which moved "
        f"by {abs(result.w - 1):.2e}, does not show this"
    )


def figure(value: float, form: str) -> str:
    """The number as text; "0" if it is so small that it is only rounding."""
    return "0" if abs(value) < 1e-24 else format(value, form)


def _figure_line(what: str, measured: float, agreement: Agreement, form: str) -> str:
    verdict = {True: "agree", False: "DO NOT AGREE", None: "not judged"}[agreement.holds]
    low, high = agreement.low, agreement.high
    interval = "" if low == high else f"{format(low, form)} .. {format(high, form)}"
    closed = figure(agreement.value, form)
    return f"{what:<28}{figure(measured, form):>12}{interval:>28}{closed:>14}   {verdict}"


# Do the measured figures agree with the closed form, and with the published figures?

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
    return degrees_of_freedom(result.updates, expected.kurtosis)


def width_of_names(result: TrainingResult, expected: ClosedForm) -> float:
    """Half the width of the variance's interval, relative to the variance."""
    low, high = interval_of_variance(1.0, degrees(result, expected))
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
    interval = of_mean(result.w, result.deviation, result.experiments)
    inaccurate = _why_inaccurate(expected, (interval[1] - interval[0]) / 2)
    of_variance = interval_of_variance(result.variance, degrees(result, expected))
    # w is a sum over the steps, so it is closer to normal than each of them.
    of_w = interval_of_variance(result.deviation**2, result.experiments - 1)
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
    half = normal_quantile() * error + row.rounding
    published_degrees = degrees_of_freedom(published * row.problem.steps, expected.kurtosis)
    ratio = of_ratio(degrees(result, expected), published_degrees)
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
    return beyond(far / error), beyond(far / (error * row.spread))


def _why_inaccurate(expected: ClosedForm, half: float) -> str:
    """Why the closed form is less accurate than the interval of w, of which ``half`` is half the
    width; "" if it is accurate enough.
    """
    if expected.curvature > half or expected.carried > MOST_CARRIED:
        return "the learning rate is too large for the closed form, which follows w to second order"
    return ""


def _within(what: str, value: float, interval: Interval, inaccurate: str = "") -> Agreement:
    low, high = interval
    holds = None if inaccurate else low <= value <= high
    return Agreement(what, value, low, high, holds, inaccurate)


def _equal(what: str, value: float, measured: float) -> Agreement:
    holds = math.isclose(value, measured, rel_tol=ROUNDING, abs_tol=ROUNDING**2)
    return Agreement(what, value, measured, measured, holds)


# The nine published rows, with the digits that were printed.

SOURCE = "published sandbox"
RANKS = 8


@dataclass(frozen=True)
class PublishedRow:
    """One published run: ``w`` after an epoch and the ``variance`` of the steps, as printed."""

    mode: str
    problem: Problem
    w: str
    variance: str

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit of w."""
        return 0.5 * 10.0 ** -len(self.w.partition(".")[2])

    @property
    def spread(self) -> float:
        """The standard deviation of the published w, relative to that of ranks that reduce.

        The published script never reduced, so each of its w is that of rank 0, which saw an eighth
        of the examples.
        """
        return sqrt(self.problem.ranks)

    def seeded(self, seed: int) -> PublishedRow:
        """The same row with the noise of another seed."""
        return replace(self, problem=replace(self.problem, seed=seed))


def _row(mode: str, lr: float, batch: int, experiments: int, w: str, variance: str) -> PublishedRow:
    problem = Problem(
        lr=lr,
        batch_size=batch,
        ranks=RANKS if mode == "multi" else 1,
        deterministic=experiments == 1,
        n_experiments=experiments,
    )
    return PublishedRow(mode, problem, w, variance)


ROWS = (
    _row("single", 1e-3, 128, 1, "0.9980", "0"),
    _row("multi", 1e-3, 16, 1, "0.9980", "0"),
    _row("single", 1e-3, 128, 10_000, "0.9981", "8.3733e-09"),
    _row("multi", 1e-3, 16, 10_000, "0.9981", "8.4037e-09"),
    _row("single", 1e-3, 16, 1, "0.9840", "0"),
    _row("multi", 8e-3, 16, 1, "0.9840", "0"),
    _row("single", 1e-3, 16, 1_000, "0.9847", "6.7332e-08"),
    _row("multi", 8e-3, 16, 1_000, "0.9848", "5.5736e-07"),
    _row("multi", 2.8284e-3, 16, 1_000, "0.9946", "6.5220e-08"),
)
"""The rows in their published order. Rows with one experiment have no noise."""


# Confidence intervals of a mean, of a variance, and of the ratio of two variances.
#
# This module needs scipy, which the extra ``sandbox`` installs.

LEVEL = 0.999
"""The confidence level of all intervals here; they are two-sided."""

Interval = tuple[float, float]
"""The lower and the upper end."""


def normal_quantile(level: float = LEVEL) -> float:
    """How many standard deviations a two-sided interval reaches: 3.29 for 99.9 %."""
    return float(stats.norm.ppf((1 + level) / 2))


def beyond(distance: float) -> float:
    """How often a normal number is so many standard deviations or more away, on either side."""
    return float(2 * stats.norm.sf(distance))


def degrees_of_freedom(count: int, kurtosis: float) -> float:
    """The degrees of freedom of the chi-square that the variance of ``count`` values follows.

    ``kurtosis`` is in excess of the normal distribution's. The variance of such a sample variance
    is ``sigma^4 (2 / (count - 1) + kurtosis / count)``; the chi-square distribution with the same
    variance is taken.
    """
    return 2 / (2 / (count - 1) + kurtosis / count)


def of_mean(mean: float, deviation: float, count: int, level: float = LEVEL) -> Interval:
    """The interval of the true mean, from the mean and standard deviation of a sample."""
    half = normal_quantile(level) * deviation / math.sqrt(count)
    return mean - half, mean + half


def interval_of_variance(variance: float, degrees: float, level: float = LEVEL) -> Interval:
    """The interval of the true variance, from the variance of a sample."""
    tail = (1 - level) / 2
    largest, smallest = stats.chi2.ppf((1 - tail, tail), degrees)
    return float(variance * degrees / largest), float(variance * degrees / smallest)


def of_ratio(above: float, below: float, level: float = LEVEL) -> Interval:
    """The interval of the ratio of two sample variances whose true variances are the same.

    ``above`` and ``below``: the degrees of freedom of the two samples.
    """
    tail = (1 - level) / 2
    low, high = stats.f.ppf((tail, 1 - tail), above, below)
    return float(low), float(high)
