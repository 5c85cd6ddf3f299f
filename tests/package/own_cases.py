"""A small case as a user writes it, with functions instead of names of the catalogue."""

from __future__ import annotations

import time
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


def the_others_wait_for(late: int, rank: Rank) -> bool:
    """True on the rank that is late, as soon as all others are about to wait for it."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"waits {rank.rank}", "")
    if rank.rank == late:
        store.wait([f"waits {other}" for other in range(rank.world_size)])
        time.sleep(0.2)
    return rank.rank == late
