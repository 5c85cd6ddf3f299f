"""What a comparison with one rank adds to what is known of where a difference is: the lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.divided_by import divisors, lines_of_divisors
from ddp_equivalence.diagnosis.lines.loss_lines import line_of_loss
from ddp_equivalence.diagnosis.lines.made_from import lines_behind
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, unexplained
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.beside_one_rank import BesideOneRank
from ddp_equivalence.diagnosis.whereabouts.lines_unlike_loss import with_unlike_loss
from ddp_equivalence.diagnosis.whereabouts.operation_names import called
from ddp_equivalence.diagnosis.whereabouts.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.whereabouts.parting import Parting
from ddp_equivalence.diagnosis.whereabouts.whereabouts import MOST_LINES, Whereabouts
from ddp_equivalence.measurement.calls import CodeLine, Kind

WRONG_ALONE = "On one rank with the whole batch the step is wrong, too."
RIGHT_ALONE = "On one rank with the whole batch the step is right."
MARKED = "> marks where the ranks part from it."

MOST_PARTINGS = 2
MOST_SHOWN = 3

ROUNDING = 1e-6

ONLY_RANKS = "one rank does not run it; from here on the values are others"

PART_OF_SUM = "makes a part, or a multiple, of what one rank has"


def with_one_rank(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    """What was found already, with what one rank shows."""
    return unless_it_fails(lambda: _with_one_rank(found, beside, view), lambda why: found)


def _with_one_rank(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    found = _with_partings(found, beside, view)
    if view.world_size == 1:
        found = replace(found, beside_one_rank="")
    return with_unlike_loss(found, beside.unlike_loss, view.world_size)


def _with_partings(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    if found.kind == "reduction" and not beside.is_right_alone and _must_be_the_loss(beside, view):
        return _wrong_loss(found, beside.factor_alone or 0.0, view)
    pointed = _lines(beside.partings, view)
    if not pointed:
        return replace(found, beside_one_rank=RIGHT_ALONE if beside.is_right_alone else WRONG_ALONE)
    found = _with_lines(found, pointed, view)
    if found.kind != "not seen":
        return found
    return replace(
        found,
        kind="own gradient" if _before_reduction(beside.partings[0]) else "reduction",
        headline="the ranks part from one rank",
        sentence="",
    )


def _must_be_the_loss(beside: BesideOneRank, view: View) -> bool:
    """True if the ranks hold the same multiple as one rank, and only backward and reductions have
    changed their gradients, without hooks, so that the loss must have this factor.
    """
    factor, calls = beside.factor_alone, view.observed.calls
    if factor is None or calls.changes() or calls.places(Kind.HOOK, Kind.TENSOR_HOOK):
        return False
    return all(
        unexplained(held, factor * view.expected) < NEGLIGIBLE for held in view.measured.by_rank
    )


def _with_lines(found: Whereabouts, pointed: Sequence[PointedLine], view: View) -> Whereabouts:
    """A line that was found already comes first, unless it is only that of the loss, or the call of
    backward, which is all that is seen of what DDP reduces.
    """
    backwards = {one.line for one in view.observed.calls.backwards}
    faults = [one for one in found.lines if one.is_fault]
    others = [one for one in found.lines if not one.is_fault]
    run = run_lines(view, 0)
    behind = [
        *(lines_of_divisors(run, pointed[0].line) if found.kind == "reduction" else ()),
        *lines_behind(run, pointed[0].line, MOST_LINES),
    ]
    notes = {one.line: one.note for one in found.lines if one.note}
    pointed = [
        replace(one, note=notes.get(one.line, one.note)) if one.note.endswith(ONLY_RANKS) else one
        for one in pointed
    ]
    is_vague = found.shows_later or found.kind == "big batch"
    if not is_vague and any(one.line not in backwards for one in faults):
        seen = [replace(one, is_fault=False) for one in pointed]
        lines = _first_of_each_line([*faults, *seen, *others])
        return replace(found, lines=lines, beside_one_rank=RIGHT_ALONE)
    seen = [replace(one, is_fault=False) for one in faults]
    lines = _first_of_each_line([*pointed, *behind, *seen, *others])
    return replace(found, lines=lines, beside_one_rank=f"{RIGHT_ALONE} {MARKED}")


def _wrong_loss(found: Whereabouts, factor: float, view: View) -> Whereabouts:
    """On one rank, where a reduction changes nothing, all gradients have a wrong factor, too."""
    loss = line_of_loss(view, "the loss that backward begins at", is_fault=True)
    run = run_lines(view, 0)
    divided = divisors(run, loss.line) if loss is not None else []
    behind = lines_behind(run, loss.line, MOST_LINES) if loss is not None else []
    lines = [
        *([loss] if loss is not None else []),
        *(PointedLine(link.line, f"sets {link.name}") for link in divided[:1]),
        *behind,
    ]
    return replace(
        found,
        kind="own gradient",
        headline=f"the loss or backward has a factor, {text_of(factor, '.4g')}",
        sentence=f"On one rank every gradient is {text_of(factor, '.6g')} times that of the big "
        "batch, too. So the loss has this factor, or its backward pass; the reduction is not to "
        "blame.",
        lines=_first_of_each_line(lines),
        fix="",
        beside_one_rank="",
    )


def _before_reduction(parting: Parting) -> bool:
    return parting.operation.in_backward or parting.operation.differentiable


def _lines(found: Sequence[Parting], view: View) -> tuple[PointedLine, ...]:
    """The lines of the partings. Those inside backward passes follow from others, if there are any,
    and have no line but that of the call of backward.
    """
    certain = [one for one in found if one.is_certain]
    outside = [one for one in certain if not one.operation.in_backward]
    lines: dict[CodeLine, PointedLine] = {}
    for parting in (outside or certain)[:MOST_PARTINGS]:
        line = parting.operation.line
        if line is not None:
            note = _note(parting, view.world_size)
            lines.setdefault(line, PointedLine(line, note, is_fault=True))
        for line in parting.parts_of_sums:
            lines.setdefault(line, PointedLine(line, PART_OF_SUM))
    for parting in found:
        line = parting.operation.line
        if not parting.is_certain and line is not None:
            lines.setdefault(line, PointedLine(line, _note(parting, view.world_size)))
            for line in parting.parts_of_sums:
                lines.setdefault(line, PointedLine(line, PART_OF_SUM))
    return tuple(lines.values())[:MOST_LINES]


def _first_of_each_line(lines: Sequence[PointedLine]) -> tuple[PointedLine, ...]:
    first: dict[tuple[str, int], PointedLine] = {}
    for one in lines:
        first.setdefault((one.line.file, one.line.number), one)
    return tuple(first.values())[:MOST_LINES]


def _note(parting: Parting, world_size: int) -> str:
    """What the operation returned on one rank, and what it returned on the others."""
    name = called(parting.operation)
    if parting.alone is None:
        return f"{name}: {ONLY_RANKS}"
    whole = parting.alone.tensor
    parts = [one.tensor for one in parting.by_rank]
    if any(part.shape != whole.shape for part in parts):
        return f"{name}: no part of what one rank has here"
    element = 0
    if whole.numel() > 1:
        spread = sum(((part - whole).abs() for part in parts), torch.zeros_like(whole))
        element = _first_of_largest(spread)
    shown = ", ".join(text_of(float(part.flatten()[element]), ".3g") for part in parts[:MOST_SHOWN])
    more = ", ..." if world_size > MOST_SHOWN else ""
    which = f", element {element}" if whole.numel() > 1 else ""
    alone = text_of(float(whole.flatten()[element]), ".3g")
    return f"{name}{which}: {alone} on one rank, here {shown}{more}"


def _first_of_largest(values: Tensor) -> int:
    """The place of the largest value; of several that are equal up to rounding, the first."""
    largest = values.flatten() >= (1 - ROUNDING) * values.max()
    return int(largest.int().argmax())
