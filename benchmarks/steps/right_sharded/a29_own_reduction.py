"""A table that fully_shard leaves alone: its gradient is sparse in rows, and reduced by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

ITEMS, SIZE = 40, 6


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS, SIZE)
        self.bias = nn.Parameter(torch.zeros(ITEMS))
        self.interact = nn.Sequential(nn.Linear(3 * SIZE, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user_item: Tensor) -> Tensor:
        first, second = self.table(user_item).unbind(dim=1)
        features = torch.cat([first, second, first * second], dim=1)
        return self.interact(features).squeeze(-1) + self.bias[user_item[:, 1]]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["pairs"]), batch["clicked"])


def clicks(generator: torch.Generator) -> dict[str, Tensor]:
    pairs = torch.randint(ITEMS, (16, 2), generator=generator)
    return {"pairs": pairs, "clicked": (pairs.sum(dim=1) % 3 == 0).float()}


def touched_rows_mean(table: nn.Embedding, used: Tensor) -> None:
    """Averages the gradient, but sends only the rows that any rank has touched."""
    size = dist.get_world_size()
    all_used = [torch.empty_like(used) for _ in range(size)]
    dist.all_gather(all_used, used)
    rows = torch.cat(all_used).unique()  # sorted, so the same on all ranks
    packed = table.weight.grad[rows]
    dist.all_reduce(packed)
    table.weight.grad[rows] = packed / size


class Replicated:
    """The parameters of this model that are whole on every rank."""

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.parameters = {model.table.weight, model.bias}

    def reduce(self, pairs: Tensor) -> None:
        touched_rows_mean(self.model.table, pairs.flatten())
        work = dist.all_reduce(self.model.bias.grad, async_op=True)
        work.wait()
        self.model.bias.grad.div_(dist.get_world_size())


def step(model: Recommender, shard: dict[str, Tensor], rank) -> None:
    replicated = Replicated(model)
    fully_shard(model.interact)
    fully_shard(model, ignored_params=replicated.parameters)
    loss(model, shard).backward()
    replicated.reduce(shard["pairs"])


case = Case(model=Recommender, batch=clicks, loss=loss, layout="1x4")
