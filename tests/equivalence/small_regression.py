"""A small regression problem: its model, batch, loss and case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

EXAMPLES, ROW, OUTPUTS = 24, 5, 3

Model = Callable[[], nn.Module]
Batch = dict[str, Tensor]
Step = Callable[[nn.Module, Any, Rank], Any]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(ROW, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, OUTPUTS))


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "rows": torch.randn(EXAMPLES, ROW, generator=generator),
        "targets": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
    }


def two_batches(generator: torch.Generator) -> Batch:
    """The big batches of two steps, joined."""
    first, second = make_batch(generator), make_batch(generator)
    return {key: torch.cat([first[key], second[key]]) for key in first}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def regression(layout: str, model: Model = build, **changes: Any) -> Case:
    """The case on this layout; ``changes``: other fields of it."""
    fields: dict[str, Any] = {"batch": make_batch, "loss": loss, "layout": layout}
    return Case(model=model, **(fields | changes))


def name(step: Step) -> str:
    """The id of a step in a test."""
    return step.__name__
