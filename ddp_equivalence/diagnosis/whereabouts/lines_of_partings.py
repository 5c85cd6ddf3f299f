"""What a comparison with one rank adds to what is known of where a difference is: the lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.lines.made_from import lines_behind
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.beside_one_rank import BesideOneRank
from ddp_equivalence.diagnosis.whereabouts.deaf_methods import with_deaf_methods
from ddp_equivalence.diagnosis.whereabouts.lines_unlike_loss import with_unlike_loss
from ddp_equivalence.diagnosis.whereabouts.operation_names import called
from ddp_equivalence.diagnosis.whereabouts.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.whereabouts.parting import Parting
from ddp_equivalence.diagnosis.whereabouts.reduction_fault import CHANGED_AFTERWARDS
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    MOST_LINES,
    Whereabouts,
    first_of_each_line,
)
from ddp_equivalence.diagnosis.whereabouts.wrong_loss import must_be_the_loss, wrong_loss
from ddp_equivalence.measurement.calls import CodeLine

WRONG_ALONE = "On one rank with the whole batch the step is wrong, too."
RIGHT_ALONE = "On one rank with the whole batch the step is right."
MARKED = "> marks where the ranks part from it."

MOST_PARTINGS = 2
MOST_SHOWN = 3
MOST_RANGES = 3

FIRST_OTHER = (
    "What earlier lines gave to the first marked line was not seen to differ from one rank; what "
    "it returns does."
)

ONLY_RANKS_RUN = "One rank does not run the marked line, and after it values are others."

ROUNDING = 1e-6

ONLY_RANKS = "one rank does not run it; from here on the values are others"

PART_OF_SUM = "makes a part, or a multiple, of what one rank has"


def lines_to_edit(best: Finding | None, found: Whereabouts | None) -> Sequence[PointedLine] | None:
    """The lines that the report points at; None if the step changes gradients that were right, on
    one rank as on several. That may be wanted, such as clipping, and any edit would only undo it.
    """
    changes = found is not None and found.headline == CHANGED_AFTERWARDS
    if changes and found is not None and found.beside_one_rank.startswith(WRONG_ALONE):
        return None
    lines: Sequence[PointedLine] = getattr(best or found, "lines", ())
    return lines


def with_one_rank(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    """What was found already, with what one rank shows."""
    return unless_it_fails(lambda: _with_one_rank(found, beside, view), lambda why: found)


def _with_one_rank(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    found = _with_partings(found, beside, view)
    if view.world_size == 1:
        found = replace(found, beside_one_rank="", marks="")
    if beside.deaf or found.explains_all:  # such a method computes the loss in its own way
        return found
    factor = beside.factor_alone
    numbers = factor is not None and any(one.explains(factor) for one in beside.scalings)
    return with_unlike_loss(found, beside.unlike_loss, view.world_size, knows_numbers=numbers)


def _with_partings(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    if beside.deaf:
        alone = RIGHT_ALONE if beside.is_right_alone else WRONG_ALONE
        return with_deaf_methods(replace(found, beside_one_rank=alone), beside.deaf, view)
    if found.explains_all:
        return replace(found, beside_one_rank=RIGHT_ALONE if beside.is_right_alone else WRONG_ALONE)
    if found.kind == "reduction" and not beside.is_right_alone and must_be_the_loss(beside, view):
        return wrong_loss(found, beside, view)
    if _is_only_backward(beside):
        return _with_backward(found, beside, view)
    pointed = lines_of_partings(beside.partings, view)
    if not pointed:
        return replace(found, beside_one_rank=RIGHT_ALONE if beside.is_right_alone else WRONG_ALONE)
    found = _with_lines(found, beside, pointed, view)
    if found.kind != "not seen":
        return found
    first = beside.partings[0]
    return replace(
        found,
        kind="own gradient" if _before_reduction(first) else "reduction",
        headline="the ranks part from one rank",
        sentence=ONLY_RANKS_RUN if first.alone is None else FIRST_OTHER,
    )


def _is_only_backward(beside: BesideOneRank) -> bool:
    """True if gradients are lost at collectives, and no value of the forward pass parts."""
    in_backward = all(one.operation.in_backward and one.alone for one in beside.partings)
    return bool(beside.past_autograd) and in_backward


def _with_backward(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    lines = []
    for one in beside.past_autograd:
        note = f"{called(one)} of what has a gradient; autograd does not know of it"
        if one.line is not None:
            lines.append(PointedLine(one.line, note, is_fault=True))
    begins = [one.pointed("backward begins") for one in view.observed.calls.backwards[:1]]
    return replace(
        found,
        kind="own gradient",
        headline="a collective loses a gradient",
        sentence=f"Autograd does not know that line {lines[0].line.number} sends what has a "
        "gradient, so nothing comes back for what other ranks make of it. No value of the forward "
        "pass was seen to part from one rank, only gradients.",
        lines=first_of_each_line([*lines, *begins]),
        fix="use a collective that autograd knows (torch.distributed.nn.functional).",
        beside_one_rank=RIGHT_ALONE,
    )


def _is_before_backward(beside: BesideOneRank) -> bool:
    """True if a value that leads to wrong gradients parts before anything is reduced."""
    first = beside.partings[0]
    return first.is_certain and first.is_first and first.alone is not None


def _with_lines(
    found: Whereabouts, beside: BesideOneRank, pointed: Sequence[PointedLine], view: View
) -> Whereabouts:
    """A line that was found already comes first, unless it is only that of the loss, or the call of
    backward, which is all that is seen of what DDP reduces.
    """
    backwards = {one.line for one in view.observed.calls.backwards}
    faults = [one for one in found.lines if one.is_fault]
    others = [one for one in found.lines if not one.is_fault]
    behind = lines_behind(run_lines(view, 0), pointed[0].line, MOST_LINES)
    notes = {one.line: one.note for one in found.lines if one.note}
    pointed = [
        replace(one, note=notes.get(one.line, one.note)) if one.note.endswith(ONLY_RANKS) else one
        for one in pointed
    ]
    is_late = found.kind == "reduction" and _is_before_backward(beside)
    is_vague = found.shows_later or found.kind == "big batch" or is_late
    if not is_vague and any(one.line not in backwards for one in faults):
        seen = [replace(one, is_fault=False) for one in pointed]
        lines = first_of_each_line([*faults, *seen, *others])
        return replace(found, lines=lines, beside_one_rank=RIGHT_ALONE)
    seen = [replace(one, is_fault=False) for one in faults]
    lines = first_of_each_line([*pointed, *behind, *seen, *others])
    marks = MARKED if any(one.is_fault for one in pointed) else ""
    return replace(found, lines=lines, beside_one_rank=RIGHT_ALONE, marks=marks)


def _before_reduction(parting: Parting) -> bool:
    return parting.operation.in_backward or parting.operation.differentiable


def lines_of_partings(found: Sequence[Parting], view: View) -> tuple[PointedLine, ...]:
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


def _note(parting: Parting, world_size: int) -> str:
    """What the operation returned on one rank, and what it returned on the others."""
    name = called(parting.operation)
    if parting.alone is None:
        return f"{name}: {ONLY_RANKS}"
    if parting.taken is not None and parting.elsewhere is not None:
        rank = next(
            rank
            for rank, (here, there) in enumerate(
                zip(parting.taken.of_rank, parting.elsewhere.of_rank, strict=True)
            )
            if here != there
        )
        here, there = parting.taken.of_rank[rank], parting.elsewhere.of_rank[rank]
        return f"{name}: rank {rank} takes {_ranges(here)} here, and {_ranges(there)} elsewhere"
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
    return f"{name}{which}: ranks {shown}{more}; big batch {alone}"


def _first_of_largest(values: Tensor) -> int:
    """The place of the largest value; of several that are equal up to rounding, the first."""
    largest = values.flatten() >= (1 - ROUNDING) * values.max()
    return int(largest.int().argmax())


def _ranges(positions: Sequence[int]) -> str:
    """Positions as text: ``0 to 3 and 12 to 15``."""
    ranges: list[list[int]] = []
    for one in positions:
        if ranges and ranges[-1][1] == one - 1:
            ranges[-1][1] = one
        else:
            ranges.append([one, one])
    shown = [f"{a} to {b}" if b > a else f"{a}" for a, b in ranges]
    if len(shown) > MOST_RANGES:
        return ", ".join([*shown[:MOST_RANGES], "..."])
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
