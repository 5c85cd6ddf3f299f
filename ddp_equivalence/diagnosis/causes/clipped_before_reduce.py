"""Each rank clipped its own gradient before the average."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, ranks_by_number
from ddp_equivalence.diagnosis.lines.of_reduction import by_hand, line_of_reduction
from ddp_equivalence.diagnosis.lines.source_tree import at_meeting, meeting_lines
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.means_of_parts import (
    Clip,
    common_events,
    gradients_by_backward,
    replayed,
)
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

NAME = "clipped_before_reduce"

EQUAL = 1e-3
"""Factors and norms whose relative difference is smaller are equal."""

ADDED_TO_NORM = (1e-6, 0.0)
"""torch's clip_grad_norm_ adds 1e-6 to the norm that it divides by; code that clips by hand may
add nothing.

Source: torch 2.13, torch/nn/utils/clip_grad.py.
"""


def predict(view: View) -> Sequence[Prediction]:
    """The mean or the sum of clipped gradients; the norm follows from the weights of the ranks."""
    if not view.parameters.sample.is_whole:
        return _with_norms_seen(view)
    weights = view.weights_of_ranks
    if weights is None or view.world_size == 1:
        return ()
    if view.observed.by_rank and not _may_have_clipped(view):
        return ()
    predictions = []
    for divisor, added in product((view.world_size, 1), ADDED_TO_NORM):
        prediction = _clipped(view, weights[0] * divisor, divisor, added)
        if prediction is not None:
            predictions.append(prediction)
    return tuple(predictions)


def _with_norms_seen(view: View) -> Sequence[Prediction]:
    """The calls that were seen, if gradients are reduced after they are clipped: the norm of what
    is not kept is known from them alone.
    """
    gradients, events = gradients_by_backward(view), common_events(view)
    if gradients is None or not events or view.world_size == 1:
        return ()
    clips = [(at, event) for at, event in enumerate(events) if isinstance(event, Clip)]
    if not clips or None in events[: clips[0][0]] or None not in events:
        return ()
    first = clips[0][1]
    held = view.on_reporting_ranks(replayed(view, events, gradients))
    clipped = [rank for rank, norm in enumerate(first.norms) if norm > first.max_norm]
    if not clipped:
        return ()
    detail = f"{ranks_by_number(clipped)} clipped to a norm of {text_of(first.max_norm, '.3g')}"
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
        or (
            call.change is not None
            and not call.change.cleared
            and (call.change.factor is None or 0 < abs(call.change.factor) < 1)
        )
        for call in calls
    )


def _clipped(view: View, kept: Tensor, divisor: int, added: float) -> Prediction | None:
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
    return Prediction(
        view.on_every_rank(held), f"{ranks} clipped to a norm of {text_of(max_norm, '.3g')}"
    )


def indication(view: View) -> Indication | None:
    """Looks for a call of torch's clip_grad_norm_."""
    max_norms = [norm for seen in view.observed.by_rank.values() for norm in seen.clipped]
    if not max_norms:
        return None
    return Indication(True, f"clip_grad_norm_ was called with max_norm {max_norms[0]:g}")


def lines(view: View) -> Sequence[PointedLine]:
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
            if len({_factor(place, rank) for rank in place.ranks}) > 1
        ]
    reduction = line_of_reduction(view, is_fault=not clips)
    for place, note in clips[:1]:
        clip, later = place.pointed(note, True), _reduction_after(place, view)
        reduced_at = (later.users_line or later.line) if later is not None else None
        is_seen = reduction is not None and reduction.line == reduced_at
        if is_seen and later is not None and meeting_lines(place.first, later) is not None:
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


def _factor(place: CallSite, rank: int) -> float | None:
    change = place.by_rank[rank][0].change
    return None if change is None or change.cleared else change.factor


def fix(view: View) -> str:
    """Clip after the reduction."""
    return f"clip after the gradients of all {view.world_size} ranks are reduced, not before."


HYPOTHESIS = Hypothesis(
    name=NAME,
    sentence="Each rank clipped the norm of its own gradient, and the clipped gradients were "
    "averaged.",
    look_at="clip_grad_norm_ before the all_reduce, or inside a communication hook: clip after it",
    predict=predict,
    indication=indication,
    tell_apart="Use a max_norm that only some ranks' gradients exceed.",
    headline="each rank clips before the reduction",
    lines=lines,
    fix=fix,
)
