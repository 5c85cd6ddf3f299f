"""The gradient still carries the factor of a loss scaler."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, WrongFactor
from ddp_equivalence.diagnosis.indications import (
    LOSS_ROUNDING,
    common_loss_factor,
    losses_close,
)
from ddp_equivalence.diagnosis.view import View

SMALLEST_SCALE_POWER = 3
LARGEST_SCALE_POWER = 32
"""Loss scales are powers of two. A scale below 8 does not prevent underflow."""


def factors(view: View) -> Sequence[WrongFactor]:
    """Every loss scale, and the inverse of every loss scale."""
    factors = []
    for power in range(SMALLEST_SCALE_POWER, LARGEST_SCALE_POWER + 1):
        scale = 2**power
        factors.append(WrongFactor(scale, f"a loss scale of {scale}"))
        factors.append(WrongFactor(1 / scale, f"divided by {scale}, but never multiplied by it"))
    return tuple(factors)


def indication(view: View) -> Indication | None:
    """Compares the losses at which backward began with those of the examples that were read."""
    loss_factor = common_loss_factor(view)
    # A loss times the world size is another cause.
    if loss_factor is None or losses_close(loss_factor, view.world_size):
        return None
    gradient_factor = view.measured.factor
    is_a_scale = loss_factor >= 2.0**SMALLEST_SCALE_POWER * (1 - LOSS_ROUNDING)
    if is_a_scale and gradient_factor and losses_close(loss_factor, gradient_factor):
        because = f"backward began at {loss_factor:.6g} times the loss of the rank's examples"
        return Indication(True, because)
    if losses_close(loss_factor, 1.0):
        because = "backward began at the loss of the rank's own examples, not scaled"
        return Indication(False, because)
    return None


HYPOTHESIS = Hypothesis(
    name="gradient_scaled_not_unscaled",
    sentence="The loss was multiplied by a loss scale, and the gradient was not divided by it.",
    look_at="GradScaler.unscale_ or scaler.step: one of them must run before the gradient is "
    "read, clipped or reduced by hand",
    factors=factors,
    indication=indication,
    tell_apart="Use another loss scale: no other cause has a factor that changes with it.",
)
