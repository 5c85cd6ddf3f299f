"""One rank holds the same multiple of the big batch's gradient as the others: its loss is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.divided_by import computes, divisors
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
from ddp_equivalence.measurement.calls import CodeLine, Kind

SAME_LOSS = 1e-5
"""Losses whose relative difference is smaller are equal."""


def must_be_the_loss(beside: BesideOneRank, view: View) -> bool:
    """True if the ranks hold the same multiple as one rank, and only backward and reductions have
    changed their gradients, so that the loss must have this factor.

    Where hooks or backward methods of the user's own run, the loss must be seen to have it.
    """
    factor = beside.factor_alone
    if factor is None or (view.observed.calls.changes() and not beside.is_left_by_backward):
        return False
    hooked = view.observed.calls.places(Kind.TENSOR_HOOK, Kind.HOOK)
    if hooked or any(one.own_backwards for one in view.observed.by_rank.values()):
        right = view.examples.big_batch_loss
        if beside.loss_alone is None or not right or not _close(beside.loss_alone / right, factor):
            return False
    return all(
        unexplained(held, factor * view.expected) < NEGLIGIBLE for held in view.measured.by_rank
    )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= SAME_LOSS * abs(other)


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
        headline=f"the loss has a wrong factor, {text_of(factor, '.4g')}",
        sentence=f"On one rank every gradient is {text_of(factor, '.6g')} times that of the big "
        "batch, too. So the loss is multiplied, or divided by another number; the reduction is not "
        "to blame.",
        lines=first_of_each_line(lines),
        fix="",
        beside_one_rank="",
        shows_later=True,
    )


def _lines_of_scalings(scalings: Sequence[Scaling], factor: float) -> Iterator[PointedLine]:
    """The lines that made the numbers by which the loss was scaled, those first of which another
    count would give the right loss.
    """
    made = [one for one in scalings if one.made_at and abs(one.number) != 1]
    for one in sorted(made, key=lambda one: not one.explains(factor)):
        how = "divides" if one.divides else "multiplies"
        note = f"makes {text_of(one.number, '.6g')}; line {one.line.number} {how} by it"
        for line in one.made_at:
            yield PointedLine(line, note)


def _lines_of_divisor(run: RunLines, line: CodeLine) -> Iterator[PointedLine]:
    """The lines that made the divisor of the loss, as far as the source shows: first the nearest
    one that computes it, and then the nearest.
    """
    found = divisors(run, line)
    computed = [one for one in found if computes(one.line, one.name)]
    for one in dict.fromkeys([*computed[:1], *found[:1]]):
        yield PointedLine(one.line, f"sets {one.name}" if one.name else "")
