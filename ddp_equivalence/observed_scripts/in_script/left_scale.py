"""Which loss scale gradients still have."""

from __future__ import annotations

from ddp_equivalence.observed_scripts.in_script.names import ModuleNames
from ddp_equivalence.observed_scripts.in_script.step_in_progress import StepInProgress

LARGE_SCALE = 1024.0
"""No reduction makes gradients so much larger or smaller than the ranks' own ones."""


def scale_that_is_left(scale: float, names: ModuleNames, now: StepInProgress) -> float:
    """The loss scale that the gradients still have, which was ``scale``. A script may have divided
    by it by hand: then they are not as much larger as the scale is than what was computed.
    """
    if scale < LARGE_SCALE:
        return scale
    squares = {"held": 0.0, "own": 0.0}
    for name, parameter in names.live_parameters():
        own = now.own.get(name)
        if parameter.grad is not None and own is not None:
            squares["held"] += float(parameter.grad.detach().double().square().sum())
            squares["own"] += float(own.double().square().sum())
    divided = squares["own"] > 0 and squares["held"] < scale * squares["own"]
    return 1.0 if divided else scale
