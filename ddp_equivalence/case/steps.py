"""Several training steps in one check: how the batch is read, and which gradient is which."""

from __future__ import annotations

from typing import Literal

Compare = Literal["gradients", "update"]
"""Whether the gradients of every step are compared, or how far all steps together move the weights.
"""

Steps = int | tuple[int, ...]
"""How many big batches the batch is read as, or how many examples each of them has."""

GradientKey = tuple[int, str]
"""Step, counted from 0, and parameter name. Updates are compared once, so their step is 0."""


def step_count(steps: Steps) -> int:
    """The number of big batches, which is the number of training steps."""
    return steps if isinstance(steps, int) else len(steps)
