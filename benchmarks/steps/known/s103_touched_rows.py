"""Recommender with large tables: ranks exchange only those rows that a batch has touched."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

USERS, ITEMS, WIDTH = 30, 24, 4


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.score = nn.Sequential(nn.Linear(2 * WIDTH, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        pair = torch.cat([self.users(users), self.items(items)], dim=1)
        return self.score(pair).squeeze(1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["users"], batch["items"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "users": torch.randint(0, USERS, (32,), generator=generator),
        "items": torch.randint(0, ITEMS, (32,), generator=generator),
        "clicked": torch.randint(0, 2, (32,), generator=generator).double(),
    }


case = Case(model=Recommender, batch=make_batch, loss=loss, layout="1x2")


class TableExchange:
    """Averages the gradient of a table. Messages are as long as the longest list of rows."""

    def __init__(self, rank: Rank) -> None:
        self.world_size = rank.world_size

    def gather(self, part: Tensor, length: int) -> list[Tensor]:
        message = part.new_zeros(length, *part.shape[1:])
        message[: len(part)] = part
        received = [torch.empty_like(message) for _ in range(self.world_size)]
        dist.all_gather(received, message)
        return received

    def __call__(self, table: nn.Parameter, used: Tensor) -> None:
        rows = used.unique()
        sizes = [rows.new_zeros(1, dtype=torch.long) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device))
        longest = max(int(size) for size in sizes)
        all_rows = self.gather(rows, longest)
        all_values = self.gather(table.grad[rows], longest)
        kept = [slice(int(size)) for size in sizes]
        index = torch.cat([part[keep] for part, keep in zip(all_rows, kept, strict=True)])
        values = torch.cat([part[keep] for part, keep in zip(all_values, kept, strict=True)])
        table.grad.zero_()
        table.grad[index] += values / self.world_size


def average_dense(module: nn.Module, world_size: int) -> None:
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size


def step(model: Recommender, shard: dict[str, Tensor], rank: Rank) -> None:
    exchange = TableExchange(rank)
    loss(model, shard).backward()
    exchange(model.users.weight, shard["users"])
    exchange(model.items.weight, shard["items"])
    average_dense(model.score, rank.world_size)
