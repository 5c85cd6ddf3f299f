"""The loss was scaled against underflow, and the gradient never unscaled."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View

LEAST = 8.0
"""A scale below this saves nothing from underflow."""


def factors(view: View) -> Sequence[Factor]:
    found = []
    for power in range(int(log2(LEAST)), 33):
        found.append(Factor(2.0**power, f"a loss scale of {2**power}"))
        found.append(Factor(2.0**-power, f"unscaled by {2**power}, never scaled"))
    return tuple(found)


def sign(view: View) -> Sign | None:
    found = indications.loss_factor(view)
    if found is None or indications.close(found, view.world_size):
        return None
    if (
        found >= LEAST * (1 - indications.CLOSE)
        and view.factor
        and indications.close(found, view.factor)
    ):
        return Sign(True, f"backward began at {found:.6g} times the loss of the rank's examples")
    if indications.close(found, 1.0):
        return Sign(False, "backward began at the loss of the rank's own examples, not scaled")
    return None


HYPOTHESIS = Hypothesis(
    name="gradient_scaled_not_unscaled",
    sentence="The loss was multiplied by a loss scale, and the gradient was not divided by it.",
    look_at="GradScaler.unscale_ or scaler.step before the gradient is read, clipped or reduced by "
    "hand",
    factors=factors,
    sign=sign,
    tell_apart="another loss scale: only this factor follows it",
)
