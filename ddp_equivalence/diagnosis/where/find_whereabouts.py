"""Decides where a difference without a name is: in a gradient, a reduction, or a division."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import common_loss_factor
from ddp_equivalence.diagnosis.lines.behind import lines_behind, lines_that_return
from ddp_equivalence.diagnosis.lines.source import run_lines
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.copies import fault_of_unequal_copies
from ddp_equivalence.diagnosis.where.division import fault_of_division
from ddp_equivalence.diagnosis.where.gradient_path import line_of, lines_of_the_loss, paths_of
from ddp_equivalence.diagnosis.where.groups import (
    fault_of_missing_sum,
    fault_of_mixed_parameters,
    fault_of_mixed_shards,
    fault_of_non_members,
    fault_of_separate_groups,
    fault_of_small_groups,
)
from ddp_equivalence.diagnosis.where.own_gradient import (
    Compared,
    backward_lines,
    compared_with_rows,
    fault_of_own_gradient,
    fault_of_zeros,
    idle_ranks,
    losses_are_right,
    where_gradients_are_missing,
)
from ddp_equivalence.diagnosis.where.pieces import EQUAL, Pieces, pieces_of, same_loss
from ddp_equivalence.diagnosis.where.reduction import fault_of_reduction
from ddp_equivalence.diagnosis.where.whereabouts import (
    MOST_LINES,
    MOST_RANKS,
    Whereabouts,
    distinct,
    not_seen,
)
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.observation import Observation

MOST_BEHIND = 8
"""So many lines behind the loss are looked at."""

COARSEST = 0.1
"""If equal vectors may differ by more than this, nothing is said about which differ."""


STANDS_OUT = 10.0
"""In a coarse precision a piece is wrong if its error is so many times that of the others."""


def find_whereabouts(view: View, why_not_watched: str = "") -> Whereabouts:
    """Where the difference is. ``why_not_watched``: why the step did not run a second time."""
    if not view.observed.by_rank:
        why = why_not_watched or "the step did not run a second time"
        return not_seen(f"there was no second run, because {why}" if why_not_watched else why)
    for fault in (
        fault_of_non_members,
        fault_of_small_groups,
        fault_of_mixed_parameters,
        fault_of_mixed_shards,
        fault_of_missing_sum,
        fault_of_unequal_copies,
        fault_of_zeros,
    ):
        if (found := fault(view)) is not None:
            return _in_step(view, found)
    pieces = pieces_of(view)
    if pieces is None or not pieces.all:
        return not_seen("no backward pass was recorded whose gradients are those of the model")
    if pieces.tolerance > COARSEST:
        return not_seen("gradients of so low a precision are equal up to rounding")
    found = _find(pieces)
    return _in_order(view, _in_step(view, _with_lines_behind(view, found)))


def _with_lines_behind(view: View, found: Whereabouts) -> Whereabouts:
    """A wrong gradient shows in the loss, and is made by the lines behind this."""
    faults = [one for one in found.lines if one.is_fault]
    if not found.shows_later or not found.lines:
        return found
    shown = faults[-1] if faults else found.lines[0]
    rank = found.ranks[0] if found.ranks else 0
    run = run_lines(view, rank)
    behind = lines_behind(run, shown.line, MOST_BEHIND)
    others = [one for one in found.lines if not one.is_fault]
    # The model is that of the case, so a line that only calls it is the least likely to be wrong.
    calls_model = {line_of(one) for one in view.observed.calls.of(rank) if one.kind is Kind.FORWARD}
    behind.sort(
        key=lambda one: not calls_model.isdisjoint((one.line, *lines_that_return(run, one.line)))
    )
    begins = [] if faults else [one for one in others if one.begins_backward]
    seen = [*faults, *(one for one in others if not one.begins_backward)]
    return replace(found, lines=distinct([*seen, *behind[:MOST_LINES], *begins]))


def _in_order(view: View, found: Whereabouts) -> Whereabouts:
    """With the lines in the order in which a rank that is concerned came to them last."""
    rank = found.ranks[0] if found.ranks else 0
    run = view.observed.by_rank[rank].trace.lines_run or {}
    order = {(line.file, line.number): number for line, number in run.items()}
    last = max(order.values(), default=0)
    lines = sorted(found.lines, key=lambda one: order.get((one.line.file, one.line.number), last))
    if found.kind == "reduction" and view.observed.calls.places(Kind.HOOK, Kind.TENSOR_HOOK):
        backwards = {one.line for one in view.observed.calls.backwards}  # in which hooks have run
        lines = [replace(one, is_fault=one.is_fault and one.line not in backwards) for one in lines]
    return replace(found, lines=tuple(lines))


def _in_step(view: View, found: Whereabouts) -> Whereabouts:
    if not view.setting.step or found.kind == "not seen":
        return found
    return replace(found, sentence=f"In step {view.setting.step + 1}: {found.sentence}")


def _find(pieces: Pieces) -> Whereabouts:
    """By what the ranks computed together: the big batch is ``weight`` times it, and what every
    rank holds ``uniform`` times; None if it is no multiple of it.
    """
    weight = pieces.factor_between(pieces.view.expected, pieces.own.sum(0))
    match weight, pieces.uniform_weight:
        case float(weight), float(uniform):
            return _another_factor(pieces, weight, uniform)
        case float(weight), None:
            return (
                fault_of_separate_groups(pieces.view)
                or _reduction(pieces, weight)
                or not_seen("the reduction is wrong, and no call showed which line makes it so")
            )
        case None, float():
            return _own(pieces) or not_seen(
                "all ranks hold the same multiple of what they computed together, but it was not "
                "recognised which examples each backward pass was of"
            )
    own, reduction = _own(pieces), _reduction(pieces, None)
    if reduction is not None and reduction.what == "gradients missing":
        # What the ranks computed is not the big batch's, however it is reduced.
        unmarked = tuple(replace(one, is_fault=False, missing="") for one in reduction.lines)
        reduction = replace(reduction, lines=unmarked, fix="")
    if reduction is None or own is None:
        return reduction or own or not_seen("too little of the step was recorded")
    return reduction if own.kind == "big batch" else own


def _reduction(pieces: Pieces, weight: float | None) -> Whereabouts | None:
    paths = paths_of(pieces)
    return fault_of_reduction(pieces, paths, weight) if paths else None


def _own(pieces: Pieces) -> Whereabouts | None:
    compared = compared_with_rows(pieces)
    if compared is None:
        return None
    idle = idle_ranks(pieces)
    if idle is not None:
        return idle
    wrong = [one for one in compared if one.factor is None]
    if wrong and pieces.is_coarse and not pieces.is_one_parameter_far_off:
        errors = sorted(one.error for one in compared)
        least = STANDS_OUT * errors[len(errors) // 2]
        wrong = [one for one in wrong if one.error > least]
        if not wrong:
            return not_seen("in this precision the gradients of all rows are rounded that far")
    if wrong:
        return fault_of_own_gradient(pieces, compared, wrong)
    return fault_of_division(pieces, compared)


def _another_factor(pieces: Pieces, weight: float, uniform: float) -> Whereabouts:
    """Everything is right up to one factor."""
    compared = compared_with_rows(pieces) or []
    times, factor = uniform / weight, _common_factor(compared)
    if factor is not None and abs(uniform * pieces.view.world_size - 1) <= EQUAL:
        return _factor_before_the_mean(pieces, compared, factor, times)
    reduction = _reduction(pieces, weight)
    if reduction is None:
        shown = text_of(times, ".6g")
        return not_seen(
            f"every gradient is {shown} times that of the big batch, and no line shows this factor"
        )
    scaled = _lines_that_scale_losses(compared)
    if any(one.is_fault for one in reduction.lines):  # either may be right, if the other undoes it
        scaled = [one and replace(one, is_fault=False) for one in scaled]
    return replace(reduction, lines=distinct([*reduction.lines, *scaled]))


def _factor_before_the_mean(
    pieces: Pieces, compared: Sequence[Compared], factor: float, times: float
) -> Whereabouts:
    """The ranks hold the mean of what they computed, which is ``factor`` times what their rows
    give. The big batch divides otherwise if that is 1.
    """
    division, is_right = fault_of_division(pieces, compared), abs(factor - 1) <= EQUAL
    begun = common_loss_factor(pieces.view)
    is_lost = begun is not None and not same_loss(begun, factor)
    may_be_lost = losses_are_right(pieces) or is_lost
    on_the_way_back = backward_lines(pieces, pieces.all[0]) if may_be_lost else []
    of_loss = division.lines if is_right else _lines_that_scale_losses(compared)
    times_its_rows = "" if is_right else f"{text_of(factor, '.6g')} times "
    what = f"{times_its_rows}what its rows give"
    if begun is not None and is_lost and on_the_way_back:
        what += f", but began at {text_of(begun, '.4g')} times their loss"
    passes = len(pieces.by_rank[0])
    each = f"each of {passes} backward passes" if passes > 1 else "backward"
    return replace(
        division,
        kind="big batch" if is_right else "own gradient",
        headline=f"every gradient is {text_of(times, '.4g')} times the big batch's",
        sentence=f"Every gradient is {text_of(times, '.6g')} times that of the big batch. The "
        f"reduction returns the mean, and {each} of a rank computes {what}.",
        lines=distinct([*on_the_way_back, *of_loss]),
        fix="" if is_right or on_the_way_back else _fix_of_a_factor(factor, times),
    )


def _fix_of_a_factor(factor: float, times: float) -> str:
    what = "leave this factor out"
    if not same_loss(factor, times):  # each of several passes has a part of the loss
        divisors = (text_of(one, ".6g") for one in (times / factor, 1 / factor))
        what = "divide each loss by {}, not by {}".format(*divisors)
    return f"{what}, or put this factor into the loss of the big batch as well."


def _lines_that_scale_losses(compared: Sequence[Compared]) -> list[PointedLine | None]:
    """The backward passes that began at another loss than that of their rows."""
    factors = [one.loss_factor for one in compared]
    if not factors or None in factors or all(same_loss(one or 0.0, 1.0) for one in factors):
        return []
    known = dict.fromkeys(text_of(one, ".4g") for one in factors if one is not None)
    shown = ", ".join([*known][:MOST_RANKS])
    times = f"{shown} times what its rows give"
    call = compared[0].piece.call
    return lines_of_the_loss(call, f"the loss: {times}", True, f"begins at the loss: {times}")


def _common_factor(compared: Sequence[Compared]) -> float | None:
    """Every piece is so many times what its rows give; None if they differ, or if one is none."""
    factors = [one.factor for one in compared if one.factor is not None]
    if not factors or len(factors) < len(compared):
        return None
    is_common = max(factors) - min(factors) <= EQUAL * max(map(abs, factors))
    return factors[0] if is_common else None


# Where a difference is that nothing can be fitted to.


def where_without_view(
    observed: Mapping[int, Observation],
    expected: Mapping[GradientKey, Tensor | None],
    view: View | None,
    why_not_watched: str,
    why_no_view: str,
) -> Whereabouts | None:
    """Where the difference is, as far as it can be said. ``why_not_watched``: why nothing was seen.

    ``expected``: the gradients of the big batch. ``view``: of the only step, if gradients are
    missing in it. ``why_no_view``: why nothing can be fitted.
    """
    if not observed:
        why = f", because {why_not_watched}" if why_not_watched else ""
        return not_seen(f"there was no second run{why}")
    if view is None:
        return not_seen(why_no_view)
    names = [name for (_, name), one in expected.items() if one is not None]
    return fault_of_mixed_parameters(view) or where_gradients_are_missing(observed, names, view)
