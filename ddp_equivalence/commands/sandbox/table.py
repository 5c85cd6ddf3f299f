"""The table of the nine published rows: what was published, what was measured, the closed form,
and whether they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_equivalence.commands.sandbox import agreement
from ddp_equivalence.commands.sandbox.agreement import Agreement
from ddp_equivalence.commands.sandbox.closed_form import ClosedForm, closed_form
from ddp_equivalence.commands.sandbox.intervals import LEVEL
from ddp_equivalence.commands.sandbox.problem import Problem
from ddp_equivalence.commands.sandbox.published import RANKS, ROWS, SOURCE, PublishedRow
from ddp_equivalence.commands.sandbox.text import figure
from ddp_equivalence.commands.sandbox.training import Progress, train
from ddp_equivalence.commands.sandbox.training_result import TrainingResult
from ddp_equivalence.comparison.digits import text_of

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
        return agreement.width(self.result, self.expected)


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
    if first.width <= agreement.WIDEST:
        return FinishedRow(row, (first,))
    count = max(MORE_EXPERIMENTS, row.problem.n_experiments)
    more = replace(row.problem, n_experiments=count)
    return FinishedRow(row, (first, _run(more, None, progress)))


def _run(problem: Problem, row: PublishedRow | None, progress: Progress) -> RowRun:
    result, expected = train(problem, progress=progress), closed_form(problem)
    agreements = agreement.with_closed_form(result, expected)
    if row is not None:
        agreements += agreement.with_published(result, expected, row)
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
    too_wide = ": too wide to exclude a factor of 1.1" if run.width > agreement.WIDEST else ""
    yield text + too_wide
    if first:
        ratio = by_name["published variance"]
        low, here, high = (
            value / run.result.variance for value in (ratio.low, ratio.value, ratio.high)
        )
        yield f"       published / measured variance {here:.3f}, allowed {low:.3f} .. {high:.3f}"


def _chances(expected: ClosedForm, row: PublishedRow) -> str:
    """How far off the published w is, as p-values, and what they say of the published script."""
    reduced, never = agreement.so_far_off(expected, row)
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
