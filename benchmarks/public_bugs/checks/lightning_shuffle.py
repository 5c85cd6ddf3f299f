"""Lightning's Trainer with a loader that shuffles; nobody has set a seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_equivalence import Case
from ddp_equivalence.adapters.lightning import lightning_step

Batch = dict[str, Tensor]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))


def rows(generator: torch.Generator) -> Batch:
    return {
        "rows": torch.randn(8, 7, generator=generator),
        "targets": torch.randn(8, 5, generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["rows"]), batch["targets"])


case = Case(model=build_model, batch=rows, loss=loss, layout="1x2", shards="own")
step = lightning_step(loss, shuffle=True)
options = {"compare": "update"}
