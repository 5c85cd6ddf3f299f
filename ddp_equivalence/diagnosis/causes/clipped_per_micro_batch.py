"""Gradients were clipped after each micro-batch, not once after the window."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.means_of_parts import (
    Clip,
    clipped,
    clips_norm,
    common_events,
    events_of,
    gradients_by_backward,
    replayed,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """What the calls that were seen leave: with what was added up so far clipped each time, or with
    each micro-batch's own gradient.
    """
    gradients = gradients_by_backward(view)
    events = common_events(view) if _clips_between_backwards(view) else None
    if gradients is None or events is None:
        return ()
    held = replayed(view, events, gradients)
    clips = [event for event in events if isinstance(event, Clip)]
    most = text_of(clips[0].max_norm, ".3g")
    detail = f"{len(gradients)} micro-batches, each clipped to a norm of {most}"
    if len(clips) != len(gradients):
        return (Prediction(view.on_reporting_ranks(held), detail),)
    of_each = [clipped(view, *one) for one in zip(gradients, clips, strict=True)]
    each = torch.stack(of_each).sum(0).mean(0)
    return (
        Prediction(view.on_reporting_ranks(held), detail),
        Prediction(view.on_every_rank(each), detail),
        Prediction(view.on_every_rank(each / len(gradients)), detail),
    )


def _clips_between_backwards(view: View) -> list[Clip]:
    """The clippings of rank 0, if at least two are told apart by a backward between them."""
    if not view.observed.covers_every_rank:
        return []
    events = events_of(view, 0)
    places = [at for at, event in enumerate(events) if isinstance(event, Clip)]
    if not places or not any(isinstance(event, int) for event in events[places[0] : places[-1]]):
        return []
    return [event for event in events if isinstance(event, Clip)]


def indication(view: View) -> Indication | None:
    """Counts the calls of clip_grad_norm_ between calls of backward."""
    clips = _clips_between_backwards(view)
    if not clips:
        return None
    return Indication(
        True, f"clip_grad_norm_ was called {len(clips)} times, with calls of backward between them"
    )


def lines(view: View) -> Sequence[PointedLine]:
    """The backward and the clipping inside the loop."""
    calls = view.observed.calls
    shown = [place.pointed(f"{len(place.calls)} times") for place in calls.backwards[-1:]]
    places = calls.places(Kind.CLIP, where=clips_norm)
    return shown + [
        place.pointed(f"{len(place.calls)} times: after each micro-batch", is_fault=True)
        for place in places[-1:]
    ]


def fix(view: View) -> str:
    """Clip once."""
    return "clip once, after the loop over the micro-batches and after the reduction."


HYPOTHESIS = Hypothesis(
    name="clipped_per_micro_batch",
    sentence="Gradients were clipped after each micro-batch, not once after the accumulation "
    "window.",
    look_at="clip_grad_norm_ inside the loop over micro-batches: clip after it, once gradients are "
    "reduced",
    predict=predict,
    indication=indication,
    tell_apart="Use a max_norm that no micro-batch exceeds: this difference then goes away.",
    headline="clipped after each micro-batch",
    lines=lines,
    fix=fix,
)
