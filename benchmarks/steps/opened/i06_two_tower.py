"""Two-tower retrieval with sampled-softmax correction; negatives come from all ranks."""

from __future__ import annotations

from typing import Callable

import torch
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

USERS, ITEMS, DIM = 30, 50, 8
PER_BATCH = 12

OBJECTIVES: dict[str, Callable[..., Tensor]] = {}


def objective(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    OBJECTIVES[function.__name__] = function
    return function


class Tower(nn.Module):
    def __init__(self, entries: int) -> None:
        super().__init__()
        self.ids = nn.Embedding(entries, DIM)
        self.deep = nn.Sequential(nn.Linear(DIM, 16), nn.GELU(), nn.Linear(16, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return self.deep(self.ids(ids))


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)

    def forward(self, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        return self.user(users), self.item(items)


def clicks(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "users": torch.randint(USERS, (PER_BATCH,), generator=generator),
        "items": torch.randperm(ITEMS, generator=generator)[:PER_BATCH],
        "popularity": 0.01 + torch.rand(PER_BATCH, generator=generator),
    }


@objective
def one_device(user: Tensor, item: Tensor, popularity: Tensor) -> Tensor:
    scores = user @ item.T - popularity.log()
    return F.cross_entropy(scores, torch.arange(len(user), device=user.device))


@objective
def across_ranks(user: Tensor, item: Tensor, popularity: Tensor) -> Tensor:
    """Own users against the items of all ranks; gradients flow back to the ranks that own them."""
    items = torch.cat(dist_nn.all_gather(item.contiguous()))
    frequencies = torch.cat(dist_nn.all_gather(popularity.contiguous()))
    scores = user @ items.T - frequencies.log()
    positives = torch.arange(len(user), device=user.device)
    return F.cross_entropy(scores, positives)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    user, item = model(batch["users"], batch["items"])
    return OBJECTIVES["one_device"](user, item, batch["popularity"])


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    user, item = ddp(shard["users"], shard["items"])
    OBJECTIVES["across_ranks"](user, item, shard["popularity"]).backward()


case = Case(model=TwoTower, batch=clicks, loss=loss, layout="2x2")
