"""The gradient still carries the factor of a loss scaler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import (
    LOSS_ROUNDING,
    Hypothesis,
    Indication,
    WrongFactor,
    common_loss_factor,
    losses_close,
)
from ddp_equivalence.diagnosis.lines.of_reduction import (
    common_factor,
    line_that_scales,
    line_that_scales_gradients,
)
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

SMALLEST_SCALE_POWER = 3
LARGEST_SCALE_POWER = 32
"""Loss scales are powers of two. A scale below 8 does not prevent underflow."""


def factors(view: View) -> Sequence[WrongFactor]:
    """Every loss scale, and the inverse of every loss scale, unless the loss was scaled."""
    loss_factor = common_loss_factor(view) if view.observed.by_rank else None
    was_scaled = loss_factor is not None and loss_factor >= 2.0**SMALLEST_SCALE_POWER
    factors = []
    for power in range(SMALLEST_SCALE_POWER, LARGEST_SCALE_POWER + 1):
        scale = 2**power
        factors.append(WrongFactor(scale, f"a loss scale of {scale}"))
        if not was_scaled:
            detail = f"divided by {scale}, but never multiplied by it"
            factors.append(WrongFactor(1 / scale, detail))
    return tuple(factors)


def indication(view: View) -> Indication | None:
    """Compares the losses at which backward began with those of the examples that were read."""
    loss_factor = common_loss_factor(view)
    # A loss times the world size is another cause.
    if loss_factor is None or losses_close(loss_factor, view.world_size):
        return None
    gradient_factor = view.measured.factor
    is_a_scale = loss_factor >= 2.0**SMALLEST_SCALE_POWER * (1 - LOSS_ROUNDING)
    if is_a_scale and _may_be_a_count(view, loss_factor):
        return None
    if is_a_scale and gradient_factor and losses_close(loss_factor, gradient_factor):
        because = (
            f"backward began at {text_of(loss_factor, '.6g')} times the loss of the rank's examples"
        )
        return Indication(True, because)
    if losses_close(loss_factor, 1.0):
        because = "backward began at the loss of the rank's own examples, not scaled"
        return Indication(False, because)
    return None


def _may_be_a_count(view: View, loss_factor: float) -> bool:
    """True if the loss is as many times too large as a sum is, and no scaler was called."""
    if view.observed.calls.places(Kind.SCALE):
        return False
    counts = view.setting.divisor_candidates.values()
    return any(losses_close(loss_factor, count / view.world_size) for count in counts)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the loss is scaled, and after which line the gradients should be unscaled."""
    calls = view.observed.calls
    scale = _scale(view)
    scaling = [
        place.pointed(f"scales the loss by {place.first.value:.6g}")
        for place in calls.places(Kind.SCALE)[-1:]
    ]
    scaled = line_that_scales(view, scale) if scale else None
    if not scaling and scaled is not None:
        if scale < 1 or line_that_scales_gradients(view, scale) is not None:
            return [scaled]
        scaling = [replace(scaled, is_fault=False)]
    missing = "scaler.unscale_(optimizer)" if calls.places(Kind.SCALE) else "a division by it"
    backwards = calls.backwards[-1:]
    unscaled = calls.places(Kind.UNSCALE)
    note = "leaves scaled gradients" + ("" if unscaled else "; nothing unscales them")
    if backwards and scaling and scaling[0].line == backwards[0].line:
        return [replace(scaling[0], is_fault=True, missing=missing)]
    return in_order(view, *scaling, *(place.pointed(note, True, missing) for place in backwards))


def _scale(view: View) -> float:
    """The number that all gradients are multiplied by; 0 if it is not known."""
    return common_factor(view) or 0.0


def fix(view: View) -> str:
    """Remove the scale."""
    scale = _scale(view)
    if 0 < scale < 1:
        return f"do not divide by {text_of(1 / scale, '.6g')}: nothing was multiplied by it."
    number = text_of(scale, ".6g") if scale else "the scale"
    if view.observed.calls.places(Kind.SCALE):
        return f"unscale the gradients (scaler.unscale_) after backward: divide them by {number}."
    return f"divide the gradients by {number}, the loss scale, after backward."


HYPOTHESIS = Hypothesis(
    name="gradient_scaled_not_unscaled",
    sentence="The loss was multiplied by a loss scale, and the gradient was not divided by it.",
    look_at="GradScaler.unscale_ or scaler.step: one of them must run before the gradient is "
    "read, clipped or reduced by hand",
    factors=factors,
    indication=indication,
    tell_apart="Use another loss scale: no other cause has a factor that changes with it.",
    headline="the gradients keep a loss scale",
    lines=lines,
    fix=fix,
)
