"""The lines at which a step leaves the loss of the case, with what they compute there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.beside_the_loss import Unlike
from ddp_equivalence.diagnosis.whereabouts.operation_names import called
from ddp_equivalence.diagnosis.whereabouts.whereabouts import MOST_LINES, Whereabouts

WRONG_ALONE = "On one rank the step is wrong, too."
BACKWARD_BEGINS = "backward begins"
"""The note on a line that tells nothing else."""

MARKED = "> marks what the loss of the case does not compute."


def with_unlike_loss(
    found: Whereabouts, unlike: Sequence[Unlike], world_size: int, *, knows_numbers: bool
) -> Whereabouts:
    """What was found already, after the lines at which the step leaves the loss of the case.

    Nothing is added where the losses are right. ``knows_numbers``: the lines that were found make
    the numbers by which the loss is scaled.
    """
    if found.kind in ("reduction", "big batch") or not unlike:
        return found
    first = [
        PointedLine(one.operation.line, _note(one), is_fault=True)
        for one in unlike
        if one.operation.line is not None
    ]
    behind = [
        PointedLine(line, f"makes what line {one.operation.line.number} reads")
        for one in unlike
        if one.operation.line is not None
        for line in one.made_at
    ]
    known = [one for one in found.lines if one.is_fault]
    if known and not found.shows_later:  # a line that was seen to do something wrong comes first
        more = [one for one in found.lines if one.note != BACKWARD_BEGINS]
        ordered = [*more, *first, *behind, *found.lines]
    else:
        others = [replace(one, is_fault=False) for one in found.lines]
        nearest = [] if knows_numbers else behind[:1]
        ordered = [*first, *nearest, *others, *behind]
    lines: dict[tuple[str, int], PointedLine] = {}
    for one in ordered:
        lines.setdefault((one.line.file, one.line.number), one)
    if found.kind == "not seen":
        headline = "the loss is not that of the case"
        found = replace(found, kind="own gradient", headline=headline, sentence="")
    alone = "" if world_size == 1 else WRONG_ALONE
    shown = tuple(lines.values())[:MOST_LINES]
    return replace(found, lines=shown, beside_one_rank=alone, marks=MARKED)


def _note(one: Unlike) -> str:
    """What the operation returned, and what that of the loss of the case returns instead."""
    name, here = called(one.operation), one.value.tensor
    if one.in_loss is None:
        if here.numel() == 1:
            number = text_of(float(here), ".5g")
            return f"{name} gives {number}, which the loss of the case does not have"
        return f"{name} gives values that the loss of the case does not have"
    there = one.in_loss.tensor
    element = int((here - there).abs().argmax())
    which = f", element {element}" if here.numel() > 1 else ""
    ours, theirs = (text_of(float(one.flatten()[element]), ".4g") for one in (here, there))
    return f"{name}{which}: {ours} here, {theirs} in the loss of the case"
