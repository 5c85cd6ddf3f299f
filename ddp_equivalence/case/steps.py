"""Several steps in one check: how the batch is read, and how each step's gradients are named."""

from __future__ import annotations

import re
from typing import Literal

Compare = Literal["gradients", "update"]

Steps = int | tuple[int, ...]

"""How a batch is read as consecutive big batches: their number, or the examples of each."""


def in_step(name: str, step: int, steps: int) -> str:
    """A parameter's name where gradients of several steps are compared."""
    return name if steps == 1 else f"{name} (step {step + 1})"


def step_of(name: str) -> str:
    """What ``in_step`` has added to a name; "" where one step is compared."""
    found = _STEP.search(name)
    return found.group() if found else ""


_STEP = re.compile(r" \(step \d+\)$")
