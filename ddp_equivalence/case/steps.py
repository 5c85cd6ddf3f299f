"""Several training steps in one check: how the batch is divided, and what is compared."""

from __future__ import annotations

from typing import Literal

Compare = Literal["gradients", "update"]
"""What is compared: the gradients of every step, or how far all steps together move the weights."""

Steps = int | tuple[int, ...]
"""The number of big batches, all of one size, that the batch is divided into; or the number of
examples in each of them."""

GradientKey = tuple[int, str]
"""Step, counted from 0, and parameter name. Updates are compared once, so their step is 0."""


def step_count(steps: Steps) -> int:
    """The number of big batches, which is the number of training steps."""
    return steps if isinstance(steps, int) else len(steps)
