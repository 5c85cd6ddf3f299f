"""Gradients were clipped while they were still multiplied by the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, WrongFactor
from ddp_equivalence.diagnosis.means_of_parts import ADDED_TO_NORM, clips_norm
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

NAME = "clipped_while_scaled"

EQUAL = 1e-3
"""Factors whose relative difference is smaller are equal."""


@dataclass(frozen=True)
class _ScaledClip:
    """A call of clip_grad_norm_ with ``max_norm``, while gradients were scaled by ``scale``."""

    call: Call
    max_norm: float
    scale: float

    @property
    def real_norm(self) -> float:
        """What the norm of the gradients themselves is limited to."""
        return self.max_norm / self.scale


def factors(view: View) -> Sequence[WrongFactor]:
    """What the clipping leaves of gradients whose norm is the scale times the right one."""
    seen = _clip_of_scaled(view)
    if seen is None:
        return ()
    whole = view.parameters.sample.is_whole
    norm = seen.scale * float(view.expected.norm()) if whole else seen.call.norm
    if norm is None:
        return ()
    left = min(1.0, seen.max_norm / (norm + ADDED_TO_NORM))
    if left == 1.0:
        return ()
    detail = f"clipping to {_number(seen.max_norm)} limited the real norm to {_real_norm(seen)}"
    return (
        WrongFactor(left, detail),
        WrongFactor(left * seen.scale, f"{detail}, and nothing unscaled the gradients"),
    )


def _clip_of_scaled(view: View) -> _ScaledClip | None:
    """The first clipping on rank 0 between a loss that was scaled and its gradients' unscaling."""
    scale = None
    for call in view.observed.calls.of(0) if view.observed.by_rank else ():
        if call.kind is Kind.SCALE:
            scale = call.value
        elif call.kind is Kind.UNSCALE or (scale is not None and _divides_by(call, scale)):
            scale = None
        elif scale not in (None, 1.0) and clips_norm(call):
            assert scale is not None
            assert call.value is not None
            return _ScaledClip(call, call.value, scale)
    return None


def _divides_by(call: Call, scale: float) -> bool:
    """True if this call takes the scale out of gradients by hand."""
    factor = call.change.factor if call.change is not None else None
    return factor is not None and abs(factor * scale - 1) < EQUAL


def indication(view: View) -> Indication | None:
    """Looks for clip_grad_norm_ between GradScaler's scale and unscale_."""
    seen = _clip_of_scaled(view)
    if seen is None:
        return None
    return Indication(
        True,
        f"clip_grad_norm_ was called with max_norm {seen.max_norm:g} while the gradients were "
        f"multiplied by a loss scale of {seen.scale:g}",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where the loss is scaled, and where its gradients are clipped."""
    seen, calls = _clip_of_scaled(view), view.observed.calls
    if seen is None:
        return ()

    def is_it(place: CallSite) -> bool:
        return seen is not None and place.first.line == seen.call.line

    scaling = [
        place.pointed(f"scales the loss by {_number(seen.scale)}")
        for place in calls.places(Kind.SCALE)[:1]
    ]
    note = f"clips to {_number(seen.max_norm)} what is scaled: the real norm is {_real_norm(seen)}"
    clipping = [
        place.pointed(note, is_fault=True)
        for place in calls.places(Kind.CLIP, where=clips_norm)
        if is_it(place)
    ]
    return [*scaling, *clipping[:1]]


def _real_norm(seen: _ScaledClip) -> str:
    return text_of(seen.real_norm, ".2g")


def _number(value: float) -> str:
    return text_of(value, ".6g")


def fix(view: View) -> str:
    """Unscale first."""
    return "call scaler.unscale_(optimizer) before clip_grad_norm_."


HYPOTHESIS = Hypothesis(
    name=NAME,
    sentence="The gradients were clipped while they were still multiplied by the loss scale, so "
    "that the limit of the real norm was the limit divided by the scale.",
    look_at="clip_grad_norm_ between scaler.scale(loss).backward() and scaler.step: call "
    "scaler.unscale_(optimizer) before it",
    factors=factors,
    indication=indication,
    tell_apart="Turn the scaler off: this difference then goes away.",
    headline="gradients are clipped while they are scaled",
    lines=lines,
    fix=fix,
)
