"""A two-tower recommender whose item table has sparse gradients, exchanged row by row."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

USER_FEATURES, ITEMS, WIDTH, EVENTS = 5, 14, 6, 16

Batch = dict[str, Tensor]


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user_tower = nn.Sequential(
            nn.Linear(USER_FEATURES, 12), nn.Tanh(), nn.Linear(12, WIDTH)
        )
        self.item_table = nn.Embedding(ITEMS, WIDTH)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.user_tower(users).unsqueeze(1) * self.item_table(items)).sum(dim=-1)


def bpr_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Bayesian personalised ranking: the clicked item before the one that was only shown."""
    pairs = torch.stack([batch["clicked"], batch["skipped"]], dim=1)
    scores = model(batch["users"], pairs)
    return F.softplus(scores[:, 1] - scores[:, 0]).mean()


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "users": torch.randn(EVENTS, USER_FEATURES, generator=generator),
        "clicked": torch.randint(ITEMS, (EVENTS,), generator=generator),
        "skipped": torch.randint(ITEMS, (EVENTS,), generator=generator),
    }


case = Case(model=TwoTower, batch=make_batch, loss=bpr_loss, layout="1x2")


class RowExchange:
    """Sends only the rows of a table that a rank has touched."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def gather_ragged(self, tensor: Tensor) -> Tensor:
        """Concatenate tensors that have another number of rows on every rank."""
        rows = torch.tensor([len(tensor)])
        all_rows = [torch.zeros_like(rows) for _ in range(self.world_size)]
        dist.all_gather(all_rows, rows)
        counts = [int(count) for count in all_rows]
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def average(self, table: nn.Embedding, touched: Tensor) -> None:
        """Replace the table's gradient by the mean over all ranks."""
        indices = touched.unique()
        values = table.weight.grad[indices]
        all_indices = self.gather_ragged(indices)
        all_values = self.gather_ragged(values)
        merged = torch.zeros_like(table.weight)
        merged[all_indices] = all_values
        table.weight.grad = merged / self.world_size


class RankingTrainer:
    def __init__(self, model: TwoTower, rank: Rank) -> None:
        self.model = model
        self.world_size = rank.world_size
        self.rows = RowExchange(rank.world_size)

    def average_dense(self) -> None:
        for parameter in self.model.user_tower.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size

    def fit(self, batch: Batch) -> None:
        bpr_loss(self.model, batch).backward()
        self.average_dense()
        touched = torch.cat([batch["clicked"], batch["skipped"]])
        self.rows.average(self.model.item_table, touched)


def step(model: TwoTower, shard: Batch, rank: Rank) -> None:
    RankingTrainer(model, rank).fit(shard)
