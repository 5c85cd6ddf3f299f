"""A small case as a user writes it, with functions instead of names of the catalogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

EXAMPLES = 12


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make_batch(generator: torch.Generator, count: int = EXAMPLES) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(count, 5, generator=generator),
        "targets": torch.randn(count, 3, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def own_case(**changes: Any) -> Case:
    fields: dict[str, Any] = {"model": build_model, "batch": make_batch, "loss": loss}
    return Case(**(fields | {"layout": "1x2"} | changes))


def right_step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
