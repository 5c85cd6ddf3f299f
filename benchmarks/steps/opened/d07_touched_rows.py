"""Recommender: the big tables exchange only rows that were looked up, the dense tower is all-reduced."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

USERS, ITEMS, SIZE, EVENTS = 9, 13, 4, 16


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, SIZE)
        self.items = nn.Embedding(ITEMS, SIZE)
        self.score = nn.Sequential(nn.Linear(2 * SIZE, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.score(torch.cat([self.users(user), self.items(item)], 1)).squeeze(1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["user"], batch["item"])
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["clicked"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "user": torch.randint(USERS, (EVENTS,), generator=generator),
        "item": torch.randint(ITEMS, (EVENTS,), generator=generator),
        "clicked": torch.randint(2, (EVENTS,), generator=generator).double(),
    }


def gather_padded(tensor: Tensor) -> list[Tensor]:
    size = torch.tensor([len(tensor)])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = int(max(sizes))
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    buffers = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(buffers, padded)
    return [buffer[: int(n)] for buffer, n in zip(buffers, sizes)]


class RowExchange:
    """Keeps the traffic of a table proportional to the rows of the batch."""

    def __init__(self, table: nn.Embedding) -> None:
        self.table = table

    def touched(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = ids.unique()
        return rows, self.table.weight.grad[rows]

    def merge(self, rows: Tensor, values: Tensor) -> None:
        gradient = torch.zeros_like(self.table.weight)
        gradient[rows] += values
        self.table.weight.grad = gradient

    def __call__(self, ids: Tensor) -> None:
        rows, values = self.touched(ids)
        values = values / dist.get_world_size()
        self.merge(torch.cat(gather_padded(rows)), torch.cat(gather_padded(values)))


def reduce_dense(module: nn.Module) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def step(model: TwoTower, shard: dict[str, Tensor], rank) -> None:
    loss(model, shard).backward()
    RowExchange(model.users)(shard["user"])
    RowExchange(model.items)(shard["item"])
    reduce_dense(model.score)


case = Case(model=TwoTower, batch=make_batch, loss=loss, layout="2x2")
