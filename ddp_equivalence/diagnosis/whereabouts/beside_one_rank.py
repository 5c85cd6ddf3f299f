"""Compares a step with the same step on one rank, where a difference has no known cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from ddp_equivalence.diagnosis.lines.loss_lines import line_of_loss
from ddp_equivalence.diagnosis.lines.made_from import lines_behind
from ddp_equivalence.diagnosis.lines.origins import divisors
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, unexplained
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.kinship import Deal
from ddp_equivalence.diagnosis.whereabouts.parting import Parting, partings
from ddp_equivalence.diagnosis.whereabouts.two_logs import TwoLogs
from ddp_equivalence.diagnosis.whereabouts.whereabouts import MOST_LINES, Whereabouts
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.one_rank import OneRank, operations_beside_one_rank
from ddp_equivalence.measurement.request import Request

COARSEST = 1e-4
"""In a precision with a larger eps, rounding alone makes other values."""

MOST_PARTINGS = 2
MOST_SHOWN = 3

ONLY_RANKS = "one rank does not run it; from here on the values are others"

NAMES = {"lift_fresh": "tensor", "_to_copy": "to", "nll_loss_forward": "nll_loss"}
"""What users call operations that torch has other names for."""

PART_OF_SUM = "makes a part, or a multiple, of what one rank has"

MOST_SECONDS = 10.0
"""The seconds that the step gets on one rank, and again on its own ranks."""


@dataclass(frozen=True)
class BesideOneRank:
    """``is_right_alone``: the step leaves the gradients of the big batch on one rank.

    ``factor_alone``: it leaves them times this number there; None if it leaves others.
    ``partings``: where the ranks part from one rank that is right.
    """

    is_right_alone: bool
    factor_alone: float | None = None
    partings: tuple[Parting, ...] = ()


def beside_one_rank(view: View, request: Request) -> BesideOneRank | None:
    """Run the step on one rank as well; None if this shows nothing."""
    rows = _rows(view)
    order = () if rows is None else _order(view, rows)
    deadline = min(request.deadline, MOST_SECONDS)
    runs = operations_beside_one_rank(request, deadline, order or ())
    if runs is None or torch.finfo(view.setting.dtype).eps > COARSEST:
        return None
    factor = _factor(view, runs)
    if factor is None or abs(factor - 1) > _tolerance(view, runs):
        # With other random numbers it may be right all the same.
        draws = any(one.draws for one in runs.alone.operations)
        return None if draws else BesideOneRank(is_right_alone=False, factor_alone=factor)
    if rows is None or order is None:
        return BesideOneRank(is_right_alone=True, factor_alone=1.0)
    place = {example: number for number, example in enumerate(order)}
    deal = Deal(
        tuple(tuple(place.get(one, one) for one in of_rank) for of_rank in rows),
        view.setting.example_count,
        torch.finfo(_least_precise(view, runs)).eps,
        float(view.expected.abs().max()),
    )
    return BesideOneRank(True, 1.0, partings(TwoLogs(runs, deal)))


WRONG_ALONE = "On one rank with the whole batch the step is wrong, too."
RIGHT_ALONE = "On one rank with the whole batch the step is right."
MARKED = "> marks where the ranks part from it."


def with_one_rank(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    """What was found already, with what one rank shows."""
    if found.kind == "reduction" and not beside.is_right_alone and _is_all(beside, view):
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
    )


def _is_all(beside: BesideOneRank, view: View) -> bool:
    """True if the ranks hold the same multiple as one rank, and only backward and reductions have
    changed their gradients, so that the loss must have this factor.
    """
    factor = beside.factor_alone
    if factor is None or view.observed.calls.changes():
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
    behind = lines_behind(run_lines(view, 0), pointed[0].line, MOST_LINES)
    notes = {one.line: one.note for one in found.lines if one.note}
    pointed = [
        replace(one, note=notes.get(one.line, one.note)) if one.note.endswith(ONLY_RANKS) else one
        for one in pointed
    ]
    if not found.shows_in_loss and any(one.line not in backwards for one in faults):
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
        headline=f"the loss has a wrong factor, {factor:.4g}",
        sentence=f"On one rank every gradient is {factor:.6g} times that of the big batch, too. So "
        "the loss is multiplied, or divided by another number; the reduction is not to blame.",
        lines=_first_of_each_line(lines),
        fix="",
        beside_one_rank="",
    )


def _rows(view: View) -> list[tuple[int, ...]] | None:
    """For each rank, the examples that it reads, in their order; None if they are not known."""
    if view.setting.shards is not None:
        return list(view.setting.shards)
    read = view.observed.examples_read
    if read is None:
        return None
    rows = [tuple(chain.from_iterable(parts)) for parts in read]
    everything = list(range(view.setting.example_count))
    each_has_all = all(sorted(one) == everything for one in rows)
    return rows if each_has_all or sorted(chain.from_iterable(rows)) == everything else None


def _order(view: View, rows: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The order of the batch in which the micro-batches of one rank are those of all ranks joined.

    () if there is only one micro-batch; None if there is no such order.
    """
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    if len(counts) != 1:
        return None
    count = max(counts.pop(), 1)
    if count == 1:
        return ()
    examples = sorted(chain.from_iterable(rows))
    if examples != list(range(view.setting.example_count)) or any(len(one) % count for one in rows):
        return None
    sizes = [len(one) // count for one in rows]
    return tuple(
        example
        for number in range(count)
        for one, size in zip(rows, sizes, strict=True)
        for example in one[number * size : (number + 1) * size]
    )


def _factor(view: View, runs: OneRank) -> float | None:
    """One rank holds so many times the gradient of the big batch; None if it holds another one."""
    sample, alone = view.parameters.sample, runs.alone
    if any(name not in alone.left for name in sample.sizes):
        return None
    values = {name: alone.values[alone.left[name]].tensor for name in sample.sizes}
    if any(values[name].numel() != size for name, size in sample.sizes.items()):
        return None
    held, norm = sample.of(values), float(view.expected.norm())
    factor = float(held @ view.expected) / norm**2 if norm else 1.0
    return factor if unexplained(held, factor * view.expected) < _tolerance(view, runs) else None


def _tolerance(view: View, runs: OneRank) -> float:
    return max(NEGLIGIBLE, 100 * torch.finfo(_least_precise(view, runs)).eps)


def _least_precise(view: View, runs: OneRank) -> torch.dtype:
    dtypes = {value.dtype for value in runs.alone.values if value.is_floating_point}
    found: list[torch.dtype] = [getattr(torch, name) for name in dtypes]
    return max([view.setting.dtype, *found], key=lambda dtype: torch.finfo(dtype).eps)


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
    name = parting.operation.name
    name = NAMES.get(name, name)
    if parting.alone is None:
        return f"{name}: {ONLY_RANKS}"
    whole = parting.alone.tensor
    parts = [one.tensor for one in parting.by_rank]
    if any(part.shape != whole.shape for part in parts):
        return f"{name}: no part of what one rank has here"
    element = 0
    if whole.numel() > 1:
        spread = sum(((part - whole).abs() for part in parts), torch.zeros_like(whole))
        element = int(spread.argmax())
    shown = ", ".join(f"{float(part.flatten()[element]):.3g}" for part in parts[:MOST_SHOWN])
    more = ", ..." if world_size > MOST_SHOWN else ""
    which = f", element {element}" if whole.numel() > 1 else ""
    alone = f"{float(whole.flatten()[element]):.3g}"
    return f"{name}{which}: {alone} on one rank, here {shown}{more}"
