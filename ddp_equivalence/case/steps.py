"""Several steps in one check: sizes of their batches, and names of their gradients."""

from __future__ import annotations

import re
from typing import Literal

Compare = Literal["gradients", "update"]

Steps = int | tuple[int, ...]
"""A batch is read as consecutive big batches, one for each step: either as so many of equal size,
or as batches with these numbers of examples."""


def in_step(name: str, step: int, steps: int) -> str:
    """The parameter's name, with the step added to it if ``steps`` is more than 1.

    ``step`` counts from 0. The name says it counting from 1: ``"weight (step 2)"``.
    """
    return name if steps == 1 else f"{name} (step {step + 1})"


def step_of(name: str) -> str:
    """The suffix that ``in_step`` added to a name, such as ``" (step 2)"``; "" if it added none."""
    suffix = _STEP_SUFFIX.search(name)
    return suffix.group() if suffix else ""


_STEP_SUFFIX = re.compile(r" \(step \d+\)$")
