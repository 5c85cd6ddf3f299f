"""A loss scale or a narrow type reaches gradients that should not know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import (
    LOSS_ROUNDING,
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
    common_loss_factor,
    losses_close,
    where_all_report,
)
from ddp_equivalence.diagnosis.lines.behind import lines_behind
from ddp_equivalence.diagnosis.lines.of_reduction import (
    common_factor,
    hook_text,
    line_of_reduction,
    line_that_scales,
    line_that_scales_gradients,
    lines_that_gave,
    lines_that_left_out,
)
from ddp_equivalence.diagnosis.lines.source import run_lines
from ddp_equivalence.diagnosis.lines.words import counted, first_of, in_order, last_of
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CollectiveCall, Kind

# The gradient still carries the factor of a loss scaler.

SMALLEST_SCALE_POWER = 3
LARGEST_SCALE_POWER = 32
"""Loss scales are powers of two. A scale below 8 does not prevent underflow."""


def _every_scale(view: View) -> Sequence[WrongFactor]:
    """Every loss scale, and the inverse of every loss scale, unless the loss was scaled."""
    loss_factor = common_loss_factor(view) if view.observed.by_rank else None
    was_scaled = loss_factor is not None and loss_factor >= 2.0**SMALLEST_SCALE_POWER
    began_with = _times_at_first(view)
    factors = []
    for power in range(SMALLEST_SCALE_POWER, LARGEST_SCALE_POWER + 1):
        scale = 2**power
        factors.append(WrongFactor(scale, f"a loss scale of {scale}"))
        if not was_scaled and began_with < scale * (1 - LOSS_ROUNDING):
            detail = f"divided by {scale}, but never multiplied by it"
            factors.append(WrongFactor(1 / scale, detail))
    return factors


def _times_at_first(view: View) -> float:
    """How many times as large as they should be the ranks' mean gradients were after backward; 0 if
    that is not known.
    """
    computed = [
        call.gradient
        for rank in view.observed.by_rank
        for call in view.observed.backwards(rank)
        if call.gradient is not None
    ]
    norm = float(view.expected.norm())
    if not computed or not norm or any(len(one) != len(view.expected) for one in computed):
        return 0.0
    return float(torch.stack(computed).sum(0).norm()) / view.world_size / norm


def _losses_scaled(view: View) -> Indication | None:
    """Compares the losses at which backward began with those of the examples that were read."""
    loss_factor, held = common_loss_factor(view), view.measured.factor
    # A loss times the world size is another cause.
    if loss_factor is None or losses_close(loss_factor, view.world_size):
        return None
    is_a_scale = loss_factor >= 2.0**SMALLEST_SCALE_POWER * (1 - LOSS_ROUNDING)
    if is_a_scale and _may_be_a_count(view, loss_factor):
        return None
    if is_a_scale and held and losses_close(loss_factor, held):
        times = text_of(loss_factor, ".6g")
        return Indication(True, f"backward began at {times} times the loss of the rank's examples")
    if losses_close(loss_factor, 1.0):
        because = "backward began at the loss of the rank's own examples, not scaled"
        return Indication(False, because)
    return None


def _may_be_a_count(view: View, loss_factor: float) -> bool:
    """True if the loss is as many times too large as a sum is, and no scaler was called."""
    counts = view.setting.divisor_candidates.values()
    return not view.observed.calls.places(Kind.SCALE) and any(
        losses_close(loss_factor, count / view.world_size) for count in counts
    )


def _lines_of_scale(view: View) -> Sequence[PointedLine]:
    """Where the loss is scaled, and after which line the gradients should be unscaled."""
    calls, scale = view.observed.calls, common_factor(view)
    by_scaler = calls.places(Kind.SCALE)
    scaling = [
        place.pointed(f"scales the loss by {place.first.value:.6g}") for place in by_scaler[-1:]
    ]
    scaled = line_that_scales(view, scale) if scale and not scaling else None
    if scale and scaled is not None:
        if scale < 1 or line_that_scales_gradients(view, scale) is not None:
            return [scaled]
        scaling = [replace(scaled, is_fault=False)]
    missing = "scaler.unscale_(optimizer)" if by_scaler else "a division by it"
    of_losses = common_loss_factor(view)
    if not scale and of_losses and (others := calls.multiplied_by(1 / of_losses)):
        decided = lines_that_left_out(view, others[-1])
        note = f"unscales {counted(len(others[-1].names), 'gradient')}"
        return in_order(view, *scaling, *decided, others[-1].pointed(note, is_fault=not decided))
    unscaled = calls.places(Kind.UNSCALE)
    note = "leaves scaled gradients" + ("" if unscaled else "; nothing unscales them")
    backward = last_of(calls.backwards, note, True, missing)
    if backward and scaling and scaling[0].line == backward[0].line:
        return [replace(scaling[0], is_fault=True, missing=missing)]
    return in_order(view, *scaling, *backward)


# Every rank scales its loss, and unscales its gradient, with a scale of its own.

EQUAL = 1e-2
"""Scales whose relative difference is smaller are equal."""

NO_WEIGHT = 1e-9
"""A weight that is smaller than this, relative to the largest, counts as zero."""


def _own_scales(view: View) -> Sequence[Prediction]:
    """The mean of the scaled gradients, unscaled on each rank by its own scale.

    Rank r then holds rank 0's gradient times (scale of rank 0 / scale of rank r). The scales
    follow from the weights of the ranks.
    """
    weights = view.weights_of_ranks
    if weights is None or bool((weights.abs() < NO_WEIGHT * weights.abs().max()).any()):
        return ()
    scales = (weights[0] / weights).mean(1)
    if float((scales - 1).abs().max()) < EQUAL or bool((scales <= 0).any()):
        return ()
    ratio = " : ".join(text_of(scale, ".4g") for scale in scales.tolist())
    return tuple(
        Prediction(
            view.on_reporting_ranks((scales[:, None] * local).mean(0) / scales[:, None]),
            f"the ratio of the ranks' scales is {ratio}",
        )
        for local in view.local_gradients
    )


def _losses_scaled_apart(view: View) -> Indication | None:
    ratios = _loss_ratios(view)
    values = ", ".join(text_of(ratio, ".4g") for ratio in ratios)
    because = f"backward began at {values} times (by rank) the loss of the rank's own examples"
    return Indication(True, because) if ratios else None


def _loss_ratios(view: View) -> list[float]:
    """The loss at which each rank's first backward began, over that of its rows.

    Empty if they are equal, or not known.
    """
    pairs = [of_rank[0] for of_rank in view.losses_of_backwards or () if of_rank]
    ratios = [begun / own for begun, own in pairs if begun is not None and own and begun == begun]
    return [] if all(losses_close(ratio, ratios[0]) for ratio in ratios) else ratios


def _lines_of_own_scales(view: View) -> Sequence[PointedLine]:
    """Where each rank scales, and where it unscales, if this was seen."""
    calls = view.observed.calls
    scaled = _unlike(calls.places(Kind.SCALE), lambda call: call.value)
    changed = _unlike(calls.changes(), lambda call: call.factor)
    note = "uses another number on each rank"
    begun = calls.backwards if _loss_ratios(view) and not scaled else []
    shown = [*last_of(scaled, note), *first_of(begun, "begins at another multiple on each rank")]
    if not shown and not changed:
        return in_order(view, line_of_reduction(view, is_fault=True))
    reduced = None if begun else line_of_reduction(view)
    read_at = [place.line for place in changed[-1:] if place.line] or [one.line for one in shown]
    made = [one for at in read_at for one in lines_behind(run_lines(view), at, 1)]
    return in_order(view, *made, *shown, reduced, *last_of(changed, note, is_fault=not shown))


def _unlike(places: Sequence[CallSite], number: Callable[[Call], float | None]) -> list[CallSite]:
    """The places that use another number on each rank, in their first calls."""
    by_place = [(one, [number(calls[0]) for calls in one.by_rank.values()]) for one in places]
    return [
        one
        for one, numbers in by_place
        if None not in numbers and not all(losses_close(n or 0, numbers[0] or 0) for n in numbers)
    ]


# A sum over the ranks is too large for the type that it is computed in.


def _overflow(view: View) -> Indication | None:
    """Looks for gradients that are finite on every rank, and are not after they were reduced."""
    measured, gradients = view.measured, view.observed_gradients
    if not measured.is_known or measured.is_finite or not view.observed.covers_every_rank:
        return None
    if gradients is None or not all(one.isfinite().all() for rank in gradients for one in rank):
        return None
    if not all("Half" in types for types in view.observed.reduced_in_half):
        return None
    lost = int((~measured.by_rank[0].isfinite()).sum())
    elements = measured.by_rank.shape[1]
    return Indication(
        True,
        f"every rank's own gradients are finite, and {lost} of {elements} elements "
        f"on rank {view.setting.reporting_ranks[0]} are not, after a reduction in float16",
        conclusive=True,
    )


def _lines_of_overflow(view: View) -> Sequence[PointedLine]:
    calls = view.observed.calls
    places = calls.reductions or calls.collectives(lambda _, of: of.elements > 1)
    note = "the sum over the ranks is too large for its type"
    return last_of(places or calls.backwards, note)


# Gradients pass through a narrower type than their own, as in a reduction in that type.

NARROWER = (torch.bfloat16, torch.float16, torch.float32)

LARGEST_FACTOR = 2.0
"""The largest factor that rounding leaves on all elements together, less 1, in eps of that type."""

NARROWER_BY = 64.0
"""A type is narrower if its eps is this many times that of the case's type."""

ENOUGH = 0.99
"""The part of the elements that must be values of the narrower type."""


def _of_narrow_type(view: View) -> Sequence[Prediction]:
    """The measurement itself, if it is the big batch's gradient up to the rounding of a narrower
    type, and nearly all its values are values of this type.
    """
    measured = view.measured.by_rank
    if not view.measured.is_finite or not bool(measured.any()):
        return ()
    eps, error = torch.finfo(view.setting.dtype).eps, (measured - view.expected).abs()
    for narrow in NARROWER:
        narrow_eps = torch.finfo(narrow).eps
        if narrow_eps < NARROWER_BY * eps:
            continue  # every value of the case's type would count as one of the narrower type
        if bool((error > view.rounding_in(narrow)).any()):
            continue
        if abs((view.measured.factor or 0.0) - 1) > LARGEST_FACTOR * narrow_eps:
            continue  # rounding moves single elements, and not all of them alike
        # The sum may have been divided by the world size after it had been rounded.
        for multiple in (measured, measured * view.world_size):
            if _values_of_type(multiple, narrow, eps) >= ENOUGH:
                name = str(narrow).removeprefix("torch.")
                detail = f"at least {ENOUGH:.0%} of the values are values of {name}"
                return (Prediction(measured, detail, fitted=True),)
    return ()


def _values_of_type(values: Tensor, narrow: torch.dtype, eps: float) -> float:
    """The part of the elements that are values of this type, up to rounding in the case's type."""
    rounded = values.to(narrow).double()
    is_value = (rounded - values).abs() <= 4 * eps * values.abs()
    return float(is_value.double().mean())


def _told_to_reduce_in(view: View) -> str:
    """The narrower type in which FSDP was told to reduce; "" if it was not."""
    calls = (call for seen in view.observed.by_rank.values() for call in seen.calls)
    return next((call.dtype for call in calls if _is_narrower(call.dtype, view)), "")


def _is_narrower(dtype: str, view: View) -> bool:
    """True for a narrower type than the gradients'; False for ""."""
    found = getattr(torch, dtype, None)
    return found is not None and torch.finfo(found).eps > torch.finfo(view.setting.dtype).eps


def _reduce_dtype_seen(view: View) -> Indication | None:
    dtype = _told_to_reduce_in(view)
    return Indication(True, f"FSDP was given reduce_dtype={dtype}") if dtype else None


def _lines_of_reduce_dtype(view: View) -> Sequence[PointedLine]:
    calls = view.observed.calls_of_all_steps
    told = calls.places(Kind.SHARDING, where=lambda call: bool(call.dtype))
    given = lines_that_gave(view, told[-1:], ("mp_policy", "mixed_precision"))
    note = f"reduces in {_told_to_reduce_in(view)}"
    return [*given, *last_of(told, note, is_fault=not given)]


def _reduced_in_half(view: View) -> Indication | None:
    if _told_to_reduce_in(view):
        return Indication(False, "FSDP was given the type that it reduces in")
    narrow = sorted(set[str]().union(*view.observed.reduced_in_half))
    return Indication(True, f"a reduction ran in {', '.join(narrow)}") if narrow else None


def _lines_of_narrow_type(view: View) -> Sequence[PointedLine]:
    """Where gradients are reduced in a narrower type, or the hook that does so."""
    calls = view.observed.calls
    backwards = {place.line for place in calls.backwards}
    narrow = calls.collectives(lambda _, of: _is_narrow(of, view))
    for place in reversed([one for one in narrow if one.line not in backwards]):
        dtype = place.first.collective.dtype if place.first.collective else ""
        note = f"reduces in {dtype}"
        return [place.pointed(note, True)]
    hooks = calls.places(Kind.HOOK)
    if hooks:
        return last_of(hooks, hook_text(hooks[-1]))
    return in_order(view, line_of_reduction(view, is_fault=True))


def _is_narrow(collective: CollectiveCall, view: View) -> bool:
    """True if it reduced more than one element in a narrower type than the gradients'."""
    is_reduced = bool(collective.reduce_op) and collective.elements > 1
    return is_reduced and _is_narrower(collective.dtype, view)


def _mend_type(view: View) -> str:
    own = str(view.setting.dtype).removeprefix("torch.")
    return f"reduce the gradients in {own}, their own type."


NOT_UNSCALED = Hypothesis(
    name="gradient_scaled_not_unscaled",
    sentence="The loss was multiplied by a loss scale, and the gradient was not divided by it.",
    look_at="GradScaler.unscale_ or scaler.step: one of them must run before the gradient is "
    "read, clipped or reduced by hand",
    headline="the gradients keep a loss scale",
    tell_apart="Use another loss scale: no other cause has a factor that changes with it.",
    multiples=_every_scale,
    indication=_losses_scaled,
    lines=_lines_of_scale,
    mend="divide the gradients once by what the loss was multiplied by (scaler.unscale_), or leave "
    "this factor out.",
)

OWN_SCALES = Hypothesis(
    name="scaler_differs_between_ranks",
    sentence="Each rank scaled its loss and unscaled the reduced gradient with a scale of its own.",
    look_at="the code that computes the scale: reduce the scale, or its input, before it is used. "
    "With a GradScaler on each rank, found_inf must be reduced so that all ranks change their "
    "scale together (torch.distributed.fsdp.sharded_grad_scaler does this)",
    headline="each rank has its own scale",
    tell_apart="Take two steps: a scaler changes its scale between them.",
    applies=where_all_report,
    held=_own_scales,
    indication=_losses_scaled_apart,
    lines=_lines_of_own_scales,
    mend="give all {ranks} ranks one scale: reduce it, or its input, before it is used.",
)

ROUNDS_DIFFERENTLY = Hypothesis(
    name="ranks_differ_by_rounding",
    sentence="Every rank holds the big batch's gradient up to rounding, but the ranks round it "
    "differently, so that their weights drift apart step by step.",
    look_at="the order in which each rank adds up what it receives (in a ring, every rank begins "
    "with another part)",
    headline="the ranks round differently",
    lines=lambda view: last_of(
        view.observed.calls.places(Kind.COLLECTIVE, Kind.CHANGE),
        "after this line the ranks hold other bits",
    ),
    mend="add up in the same order on all ranks, or broadcast the result from one rank.",
)

ROUNDING = (
    Hypothesis(
        name="overflow_in_reduction",
        sentence="The sum of the ranks' gradients overflowed in the narrow type that it was "
        "reduced in: each rank's own gradients are finite.",
        look_at="a compression hook or a cast to float16 that adds before it divides, and the loss "
        "scale: divide by the world size first, or reduce in float32",
        headline="the sum overflows where it is reduced",
        tell_apart="Use a smaller loss scale: the gradients are then finite.",
        indication=_overflow,
        lines=_lines_of_overflow,
        mend=_mend_type,
    ),
    Hypothesis(
        name="reduce_dtype",
        sentence="FSDP was told to reduce gradients in a narrower type than their own: the error "
        "is spread over all elements and has the size of that type's rounding.",
        look_at="reduce_dtype of MixedPrecisionPolicy or MixedPrecision",
        headline="reduce_dtype is narrower than the gradients",
        tell_apart="Leave reduce_dtype out: this difference then goes away.",
        held=lambda view: _of_narrow_type(view) if _told_to_reduce_in(view) else (),
        indication=_reduce_dtype_seen,
        lines=_lines_of_reduce_dtype,
        mend=lambda view: (
            f"give FSDP reduce_dtype=torch.{str(view.setting.dtype).removeprefix('torch.')}."
        ),
    ),
    Hypothesis(
        name="low_precision_reduce",
        sentence="Gradients passed through a narrower type than their own, as when they are "
        "reduced in that type: the error is spread over all elements and has the size of that "
        "type's rounding.",
        look_at="a compression hook (fp16_compress_hook, bf16_compress_hook), mixed_precision's "
        "reduce_dtype, or a cast around all_reduce",
        headline="gradients are reduced in lower precision",
        tell_apart="Run the case in the narrower type: this difference then goes away.",
        held=_of_narrow_type,
        indication=_reduced_in_half,
        lines=_lines_of_narrow_type,
        mend=_mend_type,
    ),
    ROUNDS_DIFFERENTLY,
)
