"""The nine published rows: published, measured, closed form, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_equivalence.commands.sandbox import agreement
from ddp_equivalence.commands.sandbox.agreement import Agreement
from ddp_equivalence.commands.sandbox.closed_form import ClosedForm, closed_form
from ddp_equivalence.commands.sandbox.intervals import LEVEL
from ddp_equivalence.commands.sandbox.outcome import Outcome
from ddp_equivalence.commands.sandbox.problem import Setup
from ddp_equivalence.commands.sandbox.published import RANKS, ROWS, SOURCE, Row
from ddp_equivalence.commands.sandbox.text import figure
from ddp_equivalence.commands.sandbox.training import Progress, train

GOES_ON_TO = 10_000
"""Experiments for the closed form, where the published number is too few."""


@dataclass(frozen=True)
class Part:
    """One number of experiments of a row."""

    setup: Setup
    outcome: Outcome
    expected: ClosedForm
    agreements: tuple[Agreement, ...]

    @property
    def width(self) -> float:
        """Half the interval of the variance, relative to it; 0 without noise."""
        if self.setup.deterministic:
            return 0.0
        return agreement.width(self.outcome, self.expected)


@dataclass(frozen=True)
class Done:
    """A row that was run: at the published number of experiments, and on if that is too few."""

    row: Row
    parts: tuple[Part, ...]

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        return tuple(one for part in self.parts for one in part.agreements)

    @property
    def spread(self) -> float:
        """Between ranks, the largest; 0 where all hold the same bits."""
        return max(part.outcome.spread for part in self.parts)

    @property
    def wrong(self) -> tuple[str, ...]:
        """What does not agree."""
        found = tuple(one.what for one in self.agreements if one.holds is not True)
        return (*found, "ranks differ") if self.spread else found


def run_row(row: Row, progress: Progress = lambda done, of: None) -> Done:
    """Run a row. Raises RankFailed or RanksTimedOut."""
    first = _part(row.setup, row, progress)
    if first.width <= agreement.WIDEST:
        return Done(row, (first,))
    more = replace(row.setup, n_experiments=max(GOES_ON_TO, row.setup.n_experiments))
    return Done(row, (first, _part(more, None, progress)))


def _part(setup: Setup, row: Row | None, progress: Progress) -> Part:
    outcome, expected = train(setup, progress=progress), closed_form(setup)
    found = agreement.with_closed_form(outcome, expected)
    if row is not None:
        found += agreement.with_published(outcome, expected, row)
    return Part(setup, outcome, expected, found)


def head() -> Iterator[str]:
    """The lines above the rows."""
    yield f"{'':<30}{'w after one epoch':^28}{'variance of the update steps':^34}".rstrip()
    yield (
        f"{'run':<7}{'lr':<10}{'batch':<7}{'exps':>6}{'published':>10}{'measured':>10}{'closed':>9}"
        f"{'published':>12}{'measured':>11}{'closed':>11}"
    )


def lines(done: Done) -> Iterator[str]:
    """The lines of one row: its figures, and what they were held against."""
    for number, part in enumerate(done.parts):
        yield _figures(done, part, first=number == 0)
        if not part.setup.deterministic:
            yield from _intervals(part, first=number == 0)
    if done.wrong:
        yield f"       does not agree: {', '.join(done.wrong)}"


def _figures(done: Done, part: Part, first: bool) -> str:
    row, setup, outcome, expected = done.row, part.setup, part.outcome, part.expected
    batch = str(setup.batch_size) if setup.ranks == 1 else f"{setup.batch_size} x {setup.ranks}"
    what = f"{row.mode:<7}{setup.lr:<10g}{batch:<7}" if first else f"{'':<7}{'and on to':<17}"
    published = (row.w, row.variance) if first else ("", "")
    verdict = ("DIFFER" if done.wrong else "agree") if first else ""
    line = (
        f"{what}{setup.n_experiments:>6}{published[0]:>10}{outcome.w:>10.5f}{expected.w:>9.5f}"
        f"{published[1]:>12}{figure(outcome.variance, '.4e'):>11}"
        f"{figure(expected.variance, '.4e'):>11}  {verdict}"
    )
    return line.rstrip()


def _intervals(part: Part, first: bool) -> Iterator[str]:
    found = {one.what: one for one in part.agreements}
    w, variance = found["w"], found["variance"]
    text = (
        f"       w ± {(w.high - w.low) / 2:.1e}, variance {variance.low:.4e} .. "
        f"{variance.high:.4e} (± {part.width:.1%})"
    )
    yield text + (": too wide to refuse a factor of 1.1" if part.width > agreement.WIDEST else "")
    if first:
        ratio = found["published variance"]
        low, here, high = (
            value / part.outcome.variance for value in (ratio.low, ratio.value, ratio.high)
        )
        yield f"       published / measured variance {here:.3f}, allowed {low:.3f} .. {high:.3f}"


def foot(done: Sequence[Done]) -> Iterator[str]:
    """What to make of the rows."""
    wrong = [one for one in done if one.wrong]
    kurtosis = {
        part.setup.effective_batch: part.expected.kurtosis
        for one in done
        for part in one.parts
        if not part.setup.deterministic
    }
    if kurtosis:
        found = ", ".join(f"{value:+.4f} for {batch}" for batch, value in sorted(kurtosis.items()))
        yield f"A step is a mean over the batch, and near normal: excess kurtosis {found}."
    yield f"Intervals: {LEVEL:.1%}. multi: DistributedDataParallel on {RANKS} ranks (gloo, CPU)."
    yield f"{len(done) - len(wrong)} of {len(ROWS)} published rows agree."


def as_json(done: Sequence[Done], seed: int, interrupted: bool) -> dict[str, Any]:
    """The rows that were run."""
    return {
        "source": SOURCE,
        "seed": seed,
        "rows_published": len(ROWS),
        "rows_done": len(done),
        "interrupted": interrupted,
        "rows": [_row_as_json(one) for one in done],
    }


def _row_as_json(done: Done) -> dict[str, Any]:
    return {
        "run": done.row.mode,
        "published": {"w": float(done.row.w), "variance": float(done.row.variance)},
        "agree": not done.wrong,
        "disagree": list(done.wrong),
        "spread_over_ranks": done.spread,
        "parts": [
            {
                "setup": asdict(part.setup),
                "measured": {"w": part.outcome.w, "variance": part.outcome.variance},
                "closed_form": {"w": part.expected.w, "variance": part.expected.variance},
                "agreements": [asdict(one) for one in part.agreements],
            }
            for part in done.parts
        ],
    }
