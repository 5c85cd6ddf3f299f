"""A loop with Accelerate whose loader shuffles; nobody has set a seed."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_equivalence import Case, Rank
from ddp_equivalence.adapters import Rows

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


def step(model: nn.Module, whole: Batch, rank: Rank) -> None:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Rows(whole), batch_size=4, shuffle=True)
    model, loader = accelerator.prepare(model, loader)
    for batch in loader:
        accelerator.backward(loss(model, batch))
