"""A training loop with Lightning Fabric: AdamW, clipping, and two micro-batches a step.

ddp-equivalence check examples/loop_with_fabric.py
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import AdamW

from ddp_equivalence import Case
from ddp_equivalence.adapters.lightning import fabric_step

STEPS, LARGEST_NORM, MICRO_BATCHES = 2, 0.5, 2


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    """Sixteen rows, which are two big batches of eight."""
    return {
        "rows": torch.randn(8 * STEPS, 7, generator=generator),
        "targets": torch.randn(8 * STEPS, 5, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["rows"]), batch["targets"])


def make_optimizer(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=0.01)


def loop(fabric: Fabric, model: Any, optimizer: Any, loader: Any) -> None:
    for number, batch in enumerate(loader, 1):
        accumulates = number % MICRO_BATCHES != 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            fabric.backward(loss(model, batch) / MICRO_BATCHES)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()


case = Case(model=build_model, batch=rows, loss=loss, layout="1x2", shards="own")
step = fabric_step(loop, steps=STEPS, optimizer=make_optimizer, batch_size=2)
options = {
    "compare": "update",
    "steps": STEPS,
    "optimizer": make_optimizer,
    "clip": LARGEST_NORM,
}
