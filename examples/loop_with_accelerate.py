"""A training loop with Hugging Face Accelerate: AdamW, clipping, and two micro-batches a step.

ddp-equivalence check examples/loop_with_accelerate.py
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW

from ddp_equivalence import Case
from ddp_equivalence.adapters.accelerate import accelerate_step

STEPS, LARGEST_NORM = 2, 0.5


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


def loop(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()


case = Case(model=build_model, batch=rows, loss=loss, layout="1x2", shards="own")
step = accelerate_step(loop, steps=STEPS, optimizer=make_optimizer, gradient_accumulation_steps=2)
options = {
    "compare": "update",
    "steps": STEPS,
    "optimizer": make_optimizer,
    "clip": LARGEST_NORM,
}
