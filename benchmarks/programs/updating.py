"""What programs share that train for one or three steps, and whose weights are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.programs.common import OUTPUTS, ROW, Batch, mean_squared_error, pieces

LR, STEPS = 0.05, 3


def three_batches(generator: torch.Generator) -> Batch:
    """The examples of three steps."""
    return {
        "rows": torch.randn(72, ROW, generator=generator),
        "targets": torch.randn(72, OUTPUTS, generator=generator),
    }


ONE_STEP: dict[str, Any] = {"compare": "update", "lr": LR}
"""Fields of a program with one big batch, and one SGD step."""

THREE_STEPS: dict[str, Any] = {**ONE_STEP, "steps": STEPS, "batch": three_batches}
"""Fields of a program with three big batches of 24 examples, and an SGD step for each."""


def batches(joined: Batch) -> list[Batch]:
    """The rank's part of each step's big batch."""
    return pieces(joined, len(joined["rows"]) // STEPS)


def train(ddp: nn.Module, optimizer: Optimizer, joined: Batch) -> None:
    """The usual loop."""
    for each in batches(joined):
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()
