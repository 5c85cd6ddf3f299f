"""One rank holds the same multiple of the big batch's gradient as the others: its loss is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.lines.divided_by import divisors
from ddp_equivalence.diagnosis.lines.loss_lines import line_of_loss
from ddp_equivalence.diagnosis.lines.made_from import lines_behind
from ddp_equivalence.diagnosis.lines.run_lines import RunLines, run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, unexplained
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.beside_one_rank import BesideOneRank
from ddp_equivalence.diagnosis.whereabouts.scaled_loss import Scaling
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    MOST_LINES,
    Whereabouts,
    first_of_each_line,
)
from ddp_equivalence.measurement.calls import CodeLine


def must_be_the_loss(beside: BesideOneRank, view: View) -> bool:
    """True if the ranks hold the same multiple as one rank, and only backward and reductions have
    changed their gradients, so that the loss must have this factor.
    """
    factor = beside.factor_alone
    if factor is None or view.observed.calls.changes():
        return False
    return all(
        unexplained(held, factor * view.expected) < NEGLIGIBLE for held in view.measured.by_rank
    )


def wrong_loss(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    """On one rank, where a reduction changes nothing, all gradients have a wrong factor, too."""
    factor = beside.factor_alone or 0.0
    loss = line_of_loss(view, "the loss that backward begins at", is_fault=True)
    run = run_lines(view, 0)
    lines = [
        *([loss] if loss is not None else []),
        *_lines_of_scalings(beside.scalings, factor),
        *(_lines_of_divisor(run, loss.line) if loss is not None else []),
        *(lines_behind(run, loss.line, MOST_LINES) if loss is not None else []),
    ]
    return replace(
        found,
        kind="own gradient",
        headline=f"the loss has a wrong factor, {factor:.4g}",
        sentence=f"On one rank every gradient is {factor:.6g} times that of the big batch, too. So "
        "the loss is multiplied, or divided by another number; the reduction is not to blame.",
        lines=first_of_each_line(lines),
        fix="",
        beside_one_rank="",
    )


def _lines_of_scalings(scalings: Sequence[Scaling], factor: float) -> Iterator[PointedLine]:
    """The lines that made the numbers by which the loss was scaled, those first of which another
    count would give the right loss.
    """
    made = [one for one in scalings if one.made_at and abs(one.number) != 1]
    for one in sorted(made, key=lambda one: not one.explains(factor)):
        how = "divides" if one.divides else "multiplies"
        note = f"makes {one.number:.6g}, by which line {one.line.number} {how}"
        for line in one.made_at:
            yield PointedLine(line, note)


def _lines_of_divisor(run: RunLines, line: CodeLine) -> Iterator[PointedLine]:
    """The lines that made the divisor of the loss, as far as the source shows: first the farthest
    one, which computes it, and then the nearest.
    """
    found = divisors(run, line)
    for one in dict.fromkeys([*found[-1:], *found[:1]]):
        yield PointedLine(one.line, f"sets {one.name}" if one.name else "")
