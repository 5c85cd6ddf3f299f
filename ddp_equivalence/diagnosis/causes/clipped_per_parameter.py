"""The norm of each parameter's gradient was clipped by itself, not that of all together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

EQUAL = 1e-4
"""Norms and factors whose relative difference is smaller are equal."""


def predict(view: View) -> Sequence[Prediction]:
    """The clippings that were seen, after the reduction and where they were; else what equal norms
    of several parameters tell.
    """
    if not view.measured.is_known:
        return ()
    whole, clips = view.parameters.sample.is_whole, _partial_clips(view)
    if not clips:
        return _by_equal_norms(view) if whole else ()
    if not whole and not all(clip.norms for clip in clips):
        return ()
    after = view.expected[None]
    for clip in clips:
        after = clipped(view, after, clip)
    detail = f"{len(clips)} clippings, to a norm of {text_of(clips[0].max_norm, '.3g')} each"
    predictions = [Prediction(view.on_every_rank(after[0]), detail)]
    gradients, events = gradients_by_backward(view), common_events(view)
    if gradients is not None and events is not None:
        held = replayed(view, events, gradients)
        predictions.append(Prediction(view.on_reporting_ranks(held), detail))
    return tuple(predictions)


def _partial_clips(view: View) -> list[Clip]:
    """The clippings of rank 0, if each was given only some of the parameters."""
    if not view.observed.covers_every_rank:
        return []
    clips = [one for one in events_of(view, 0) if isinstance(one, Clip)]
    every = set(view.parameters.names)
    are_partial = all(one.names and not every <= set(one.names) for one in clips)
    return clips if are_partial and len({one.names for one in clips}) > 1 else []


def _by_equal_norms(view: View) -> Sequence[Prediction]:
    """Code that clips by hand: several parameters have the same norm, which no other exceeds."""
    measured = view.measured.by_rank
    if not view.measured.is_finite or view.measured.ranks_differ:
        return ()
    kept = {name: _multiple(view, name, measured[0]) for name in view.parameters.names}
    norms = {
        name: float(measured[0][place].norm()) for name, place in view.parameters.places.items()
    }
    shrunk = [name for name, factor in kept.items() if factor is not None and factor < 1 - EQUAL]
    if len(shrunk) < 2 or None in kept.values():
        return ()
    max_norm = sum(norms[name] for name in shrunk) / len(shrunk)
    if any(abs(norms[name] - max_norm) > EQUAL * max_norm for name in shrunk):
        return ()
    if len({kept[name] for name in shrunk}) < 2:
        return ()  # all were multiplied by one number
    held = view.expected[None]
    for name in view.parameters.names:
        held = clipped(view, held, Clip(max_norm, (name,), added=0.0))
    detail = f"{len(shrunk)} parameters have a gradient of norm {text_of(max_norm, '.3g')}"
    return (Prediction(view.on_every_rank(held[0]), detail, fitted=True),)


def _multiple(view: View, name: str, measured: Tensor) -> float | None:
    """What this parameter's right gradient was multiplied by; None if it is no multiple of it."""
    place = view.parameters.places[name]
    right, held = view.expected[place], measured[place]
    if not bool(torch.any(right)):
        return 1.0 if not bool(torch.any(held)) else None
    factor = float(held @ right) / float(right @ right)
    return factor if factor > 0 and nearly_equal(held, factor * right) else None


def indication(view: View) -> Indication | None:
    """Looks for several calls of clip_grad_norm_, each with some of the parameters."""
    clips = _partial_clips(view)
    if not clips:
        return None
    return Indication(
        True,
        f"clip_grad_norm_ was called {len(clips)} times, each time with {len(clips[0].names)} of "
        f"{len(view.parameters.names)} parameters",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """The clipping, or the line that multiplies gradients by several numbers."""
    calls = view.observed.calls
    clips = calls.places(Kind.CLIP, where=clips_norm)
    if clips:
        note = f"{len(clips[-1].calls)} times, each time with {len(clips[-1].first.names)} gradient"
        return [place.pointed(note, is_fault=True) for place in clips[-1:]]
    by_hand = [
        place
        for place in calls.changes(lambda call: bool(call.change and call.change.factor))
        if len({call.change.factor for call in place.calls if call.change}) > 1
    ]
    return [
        place.pointed("multiplies gradients by different numbers", is_fault=True)
        for place in by_hand[-1:]
    ]


def fix(view: View) -> str:
    """One norm for all."""
    return "call clip_grad_norm_(model.parameters(), max_norm) once: one norm for all parameters."


HYPOTHESIS = Hypothesis(
    name="clipped_per_parameter",
    sentence="Each parameter's gradient was clipped by its own norm, not by the norm of all "
    "parameters together.",
    look_at="clip_grad_norm_ inside a loop over parameters or layers: give it all parameters at "
    "once",
    predict=predict,
    indication=indication,
    tell_apart="Use a max_norm that no parameter's gradient exceeds: this difference then goes "
    "away.",
    headline="each parameter is clipped by itself",
    lines=lines,
    fix=fix,
)
