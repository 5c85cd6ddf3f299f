"""Gradients are clipped before they are whole, reduced or unscaled, or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
    common_loss_factor,
    on_every_rank,
    ranks_by_number,
)
from ddp_equivalence.diagnosis.lines.decisions import at_meeting
from ddp_equivalence.diagnosis.lines.of_reduction import by_hand, line_of_reduction
from ddp_equivalence.diagnosis.lines.words import first_of, in_order, last_of
from ddp_equivalence.diagnosis.means_of_parts import (
    ADDED_TO_NORM,
    Clip,
    clipped,
    clips_norm,
    common_events,
    events_of,
    gradients_by_backward,
    norm_before_clipping,
    replayed,
)
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

EQUAL = 1e-3
"""Factors and norms whose relative difference is smaller are equal."""


def _clips_of_rank_0(view: View) -> list[Clip]:
    if not view.observed.covers_every_rank:
        return []
    return [one for one in events_of(view, 0) if isinstance(one, Clip)]


def _replayed(view: View) -> Tensor | None:
    """What the ranks hold after all that was seen to happen to their gradients, if it is known."""
    gradients, events = gradients_by_backward(view), common_events(view)
    if gradients is None or events is None:
        return None
    return view.on_reporting_ranks(replayed(view, events, gradients))


# Each rank clips its own gradient before the average.


def _clipped_by_rank(view: View) -> Sequence[Prediction]:
    """The mean or the sum of clipped gradients; the norm follows from the weights of the ranks."""
    if not view.parameters.sample.is_whole:
        return _with_norms_seen(view)
    weights = view.weights_of_ranks
    if weights is None or view.world_size == 1:
        return ()
    if view.observed.by_rank and not _may_have_clipped(view):
        return ()
    # Code that clips by hand may add nothing to the norm that it divides by.
    found = (
        _with_one_norm(view, weights[0] * divisor, divisor, added)
        for divisor, added in product((view.world_size, 1), (ADDED_TO_NORM, 0.0))
    )
    return [one for one in found if one is not None]


def _with_norms_seen(view: View) -> Sequence[Prediction]:
    """The calls that were seen, if gradients are reduced after they are clipped: the norm of what
    is not kept is known from them alone.
    """
    held, events = _replayed(view), common_events(view) or []
    clips = [(at, event) for at, event in enumerate(events) if isinstance(event, Clip)]
    if held is None or not clips or view.world_size == 1:
        return ()
    at, first = clips[0]
    ranks = [rank for rank, norm in enumerate(first.norms) if norm > first.max_norm]
    if None in events[:at] or None not in events or not ranks:
        return ()
    detail = f"{ranks_by_number(ranks)} clipped to a norm of {text_of(first.max_norm, '.3g')}"
    return Prediction(held, detail), Prediction(held * view.world_size, detail)


def _may_have_clipped(view: View) -> bool:
    """True if a rank was seen to clip, or to make gradients smaller by itself.

    Without that, a single rank that counts less than the others may have any other reason.
    """
    if any(seen.clipped for seen in view.observed.by_rank.values()):
        return True
    calls = (call for rank in view.observed.by_rank for call in view.observed.calls.of(rank))
    return any(
        call.kind is Kind.CLIP
        or (call.rewrites and not call.clears)
        or 0 < abs(call.factor or 0) < 1
        for call in calls
    )


def _with_one_norm(view: View, kept: Tensor, divisor: int, added: float) -> Prediction | None:
    """The prediction, or None if no single norm explains what each rank ``kept``.

    ``kept``: the factor that each rank's gradient was multiplied by, shape (world size,).
    """
    local = view.local_gradients[0]
    norms = local.norm(dim=1) + added
    is_clipped = kept < 1 - EQUAL
    if not bool(is_clipped.any()) or bool((kept <= 0).any()):
        return None
    norms_after = (kept * norms)[is_clipped]
    max_norm = norms_after.mean()
    if float((norms_after - max_norm).abs().max()) > EQUAL * float(max_norm):
        return None
    factors = torch.clamp(max_norm / norms, max=1.0)
    if bool((factors[~is_clipped] < 1 - EQUAL).any()):
        return None
    ranks = ranks_by_number(torch.nonzero(is_clipped).flatten().tolist())
    held = (factors[:, None] * local).sum(0) / divisor
    detail = f"{ranks} clipped to a norm of {text_of(max_norm, '.3g')}"
    return Prediction(view.on_every_rank(held), detail)


def _clip_seen(view: View) -> Indication | None:
    max_norms = [norm for seen in view.observed.by_rank.values() for norm in seen.clipped]
    if not max_norms:
        return None
    return Indication(True, f"clip_grad_norm_ was called with max_norm {max_norms[0]:g}")


def _lines_before_reducing(view: View) -> Sequence[PointedLine]:
    """Where gradients are clipped, and where they are reduced afterwards."""
    calls = view.observed.calls
    clips = [
        (place, f"clips each rank's own gradients{_to(place)}")
        for place in calls.places(Kind.CLIP)
        if _reduction_after(place, view) is not None
    ]
    if not clips:  # by hand: the same line multiplies by another number on another rank
        clips = [
            (place, "scales each rank's gradients by a number of its own")
            for place in calls.changes(lambda call: not call.in_backward)
            if len({place.by_rank[rank][0].factor for rank in place.ranks}) > 1
        ]
    reduction = line_of_reduction(view, is_fault=not clips)
    for place, note in clips[:1]:
        clip, later = place.pointed(note, True), _reduction_after(place, view)
        if reduction is not None and later is not None and reduction.line == later.at:
            return at_meeting(clip, reduction, place.first, later)
        return in_order(view, clip, reduction)
    return in_order(view, reduction)


def _reduction_after(place: CallSite, view: View) -> Call | None:
    """The first call that reduced gradients by hand after the first clip of this place."""
    calls = view.observed.calls.of(place.ranks[0])
    after = calls[calls.index(place.first) :]
    reducing = {id(call) for one in by_hand(view) for call in one.by_rank.get(place.ranks[0], ())}
    return next((call for call in after if id(call) in reducing), None)


def _to(place: CallSite) -> str:
    value = place.first.value
    return "" if value is None else f" to {text_of(value, '.3g')}"


def _clips_between_backwards(view: View) -> list[Clip]:
    """The clippings of rank 0, if at least two are told apart by a backward between them."""
    clips = _clips_of_rank_0(view)
    events = events_of(view, 0) if clips else []
    places = [at for at, event in enumerate(events) if isinstance(event, Clip)]
    between = events[places[0] : places[-1]] if places else []
    return clips if any(isinstance(event, int) for event in between) else []


def _clipped_by_micro_batch(view: View) -> Sequence[Prediction]:
    """What the calls that were seen leave: with what was added up so far clipped each time, or with
    each micro-batch's own gradient.
    """
    held = _replayed(view) if _clips_between_backwards(view) else None
    gradients = gradients_by_backward(view) or []
    if held is None:
        return ()
    clips = [event for event in common_events(view) or () if isinstance(event, Clip)]
    most = text_of(clips[0].max_norm, ".3g")
    detail = f"{len(gradients)} micro-batches, each clipped to a norm of {most}"
    of_each = []
    if len(clips) == len(gradients):
        rows = [clipped(view, *one) for one in zip(gradients, clips, strict=True)]
        each = torch.stack(rows).sum(0).mean(0)
        of_each = [each, each / len(gradients)]
    return Prediction(held, detail), *on_every_rank(view, *of_each, detail=detail)


def _clips_seen_between(view: View) -> Indication | None:
    clips = _clips_between_backwards(view)
    because = f"clip_grad_norm_ was called {len(clips)} times, with calls of backward between them"
    return Indication(True, because) if clips else None


def _partial_clips(view: View) -> list[Clip]:
    """The clippings of rank 0, if each was given only some of the parameters."""
    clips, every = _clips_of_rank_0(view), set(view.parameters.names)
    are_partial = all(one.names and not every <= set(one.names) for one in clips)
    return clips if are_partial and len({one.names for one in clips}) > 1 else []


def _clipped_in_parts(view: View) -> Sequence[Prediction]:
    """The clippings that were seen, after the reduction and where they were."""
    clips = _partial_clips(view) if view.measured.is_known else []
    if not clips or not (view.parameters.sample.is_whole or all(clip.norms for clip in clips)):
        return ()
    after = view.expected[None]
    for clip in clips:
        after = clipped(view, after, clip)
    detail = f"{len(clips)} clippings, to a norm of {text_of(clips[0].max_norm, '.3g')} each"
    held = _replayed(view)
    replays = [] if held is None else [Prediction(held, detail)]
    return *on_every_rank(view, after[0], detail=detail), *replays


def _partial_clips_seen(view: View) -> Indication | None:
    clips = _partial_clips(view)
    if not clips:
        return None
    return Indication(
        True,
        f"clip_grad_norm_ was called {len(clips)} times, each time with {len(clips[0].names)} of "
        f"{len(view.parameters.names)} parameters",
    )


def _lines_in_parts(view: View) -> Sequence[PointedLine]:
    places = view.observed.calls.places(Kind.CLIP, where=clips_norm)[-1:]
    note = "{} times, each time with {} gradient"
    return [one.pointed(note.format(len(one.calls), len(one.first.names)), True) for one in places]


class _ScaledClip(NamedTuple):
    """A call of clip_grad_norm_ with ``max_norm``, while gradients were scaled by ``scale``."""

    call: Call
    max_norm: float
    scale: float

    @property
    def real_norm(self) -> str:
        """What the norm of the gradients themselves is limited to."""
        return text_of(self.max_norm / self.scale, ".2g")


def _clip_of_scaled(view: View) -> _ScaledClip | None:
    """The first clipping on rank 0 between a loss that was scaled and its gradients' unscaling."""
    scale = None
    for call in view.observed.calls.of(0) if view.observed.by_rank else ():
        if call.kind is Kind.SCALE:
            scale = call.value
        elif call.kind is Kind.UNSCALE or (
            scale and isclose((call.factor or 0) * scale, 1, rel_tol=EQUAL)
        ):
            scale = None
        elif clips_norm(call) and call.value is not None:
            of_call = _scale_by_hand(view, call) if scale is None else scale
            if of_call not in (None, 1.0):
                return _ScaledClip(call, call.value, of_call or 0.0)
    return None


def _scale_by_hand(view: View, clip: Call) -> float | None:
    """The number by which the losses are multiplied, if a line divides the gradients by it after
    this call.
    """
    calls, losses = view.observed.calls.of(0), common_loss_factor(view) or 0.0
    factors = [call.factor or 0.0 for call in calls[calls.index(clip) + 1 :]]
    for scale in (losses, losses * len(view.observed.backwards(0))):
        if scale > 1 and any(isclose(scale * one, 1, rel_tol=EQUAL) for one in factors):
            return scale
    return None


def _left_of_scaled(view: View) -> Sequence[WrongFactor]:
    """What the clipping leaves of gradients whose norm is the scale times the right one."""
    seen = _clip_of_scaled(view)
    if seen is None:
        return ()
    whole = view.parameters.sample.is_whole
    norm = seen.scale * float(view.expected.norm()) if whole else seen.call.norm
    left = 1.0 if norm is None else seen.max_norm / (norm + ADDED_TO_NORM)
    before = norm_before_clipping(view, seen.max_norm) if whole else None
    if before is not None:
        left = (before + ADDED_TO_NORM) / (seen.scale * before + ADDED_TO_NORM)
    if left >= 1.0:
        return ()
    detail = f"clipping to {text_of(seen.max_norm, '.6g')} limited the real norm to "
    detail += seen.real_norm
    return (
        WrongFactor(left, detail),
        WrongFactor(left * seen.scale, f"{detail}, and nothing unscaled the gradients"),
    )


def _clip_seen_while_scaled(view: View) -> Indication | None:
    seen = _clip_of_scaled(view)
    if seen is None:
        return None
    return Indication(
        True,
        f"clip_grad_norm_ was called with max_norm {seen.max_norm:g} while the gradients were "
        f"multiplied by a loss scale of {seen.scale:g}",
    )


def _lines_while_scaled(view: View) -> Sequence[PointedLine]:
    seen, calls = _clip_of_scaled(view), view.observed.calls
    if seen is None:
        return ()
    line, most = seen.call.line, text_of(seen.max_norm, ".6g")
    clips = [one for one in calls.places(Kind.CLIP, where=clips_norm) if one.first.line == line]
    note = f"clips to {most} what is scaled: the real norm is {seen.real_norm}"
    scales = f"scales the loss by {text_of(seen.scale, '.6g')}"
    return [*first_of(calls.places(Kind.SCALE), scales, is_fault=False), *first_of(clips, note)]


BEFORE_REDUCE = Hypothesis(
    name="clipped_before_reduce",
    sentence="Each rank clipped the norm of its own gradient, and the clipped gradients were "
    "averaged.",
    look_at="clip_grad_norm_ before the all_reduce, or inside a communication hook: clip after it",
    headline="each rank clips before the reduction",
    tell_apart="Use a max_norm that only some ranks' gradients exceed.",
    held=_clipped_by_rank,
    indication=_clip_seen,
    lines=_lines_before_reducing,
    mend="clip after the gradients of all {ranks} ranks are reduced, not before.",
)

WHILE_SCALED = Hypothesis(
    name="clipped_while_scaled",
    sentence="The gradients were clipped while they were still multiplied by the loss scale, so "
    "that the limit of the real norm was the limit divided by the scale.",
    look_at="clip_grad_norm_ between scaler.scale(loss).backward() and scaler.step: call "
    "scaler.unscale_(optimizer) before it",
    headline="gradients are clipped while they are scaled",
    tell_apart="Turn the scaler off: this difference then goes away.",
    multiples=_left_of_scaled,
    indication=_clip_seen_while_scaled,
    lines=_lines_while_scaled,
    mend=lambda view: (
        "call scaler.unscale_(optimizer) before clip_grad_norm_."
        if any(call.kind is Kind.SCALE for call in view.observed.calls.of(0))
        else "divide the gradients by the loss scale before they are clipped, not afterwards."
    ),
)

CAUSES = (
    BEFORE_REDUCE,
    Hypothesis(
        name="clipped_per_micro_batch",
        sentence="Gradients were clipped after each micro-batch, not once after the accumulation "
        "window.",
        look_at="clip_grad_norm_ inside the loop over micro-batches: clip after it, once gradients "
        "are reduced",
        headline="clipped after each micro-batch",
        tell_apart="Use a max_norm that no micro-batch exceeds: this difference then goes away.",
        held=_clipped_by_micro_batch,
        indication=_clips_seen_between,
        lines=lambda view: [
            *last_of(view.observed.calls.backwards, "runs for each micro-batch", is_fault=False),
            *last_of(
                view.observed.calls.places(Kind.CLIP, where=clips_norm),
                "clips after each micro-batch",
            ),
        ],
        mend="clip once, after the loop over the micro-batches and after the reduction.",
    ),
    Hypothesis(
        name="clipped_per_parameter",
        sentence="Each parameter's gradient was clipped by its own norm, not by the norm of all "
        "parameters together.",
        look_at="clip_grad_norm_ inside a loop over parameters or layers: give it all parameters "
        "at once",
        headline="each parameter is clipped by itself",
        tell_apart="Use a max_norm that no parameter's gradient exceeds: this difference then goes "
        "away.",
        held=_clipped_in_parts,
        indication=_partial_clips_seen,
        lines=_lines_in_parts,
        mend="call clip_grad_norm_(model.parameters(), max_norm) once: one norm for all "
        "parameters.",
    ),
    WHILE_SCALED,
)
