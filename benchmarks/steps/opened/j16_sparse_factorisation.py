"""Matrix factorisation with sparse gradients: only the rows that were looked up are exchanged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

USERS, ITEMS, FACTORS = 9, 14, 4


class Factorisation(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, FACTORS, sparse=True)
        self.items = nn.Embedding(ITEMS, FACTORS, sparse=True)
        self.popularity = nn.Embedding(ITEMS, 1, sparse=True)
        self.scale = nn.Parameter(torch.tensor([1.0, 0.1]))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        match = (self.users(user) * self.items(item)).sum(dim=1)
        return self.scale[0] * match + self.scale[1] + self.popularity(item).squeeze(1)


def loss(model: nn.Module, batch: dict) -> Tensor:
    """Bayesian personalised ranking: what was bought should score above what was not."""
    bought = model(batch["user"], batch["bought"])
    ignored = model(batch["user"], batch["ignored"])
    return F.softplus(ignored - bought).mean()


def purchases(generator: torch.Generator) -> dict:
    def some(limit: int) -> Tensor:
        return torch.randint(0, limit, (20,), generator=generator)

    return {"user": some(USERS), "bought": some(ITEMS), "ignored": some(ITEMS)}


case = Case(model=Factorisation, batch=purchases, loss=loss, layout="1x2")


class SparseExchange:
    def __init__(self, ranks: int):
        self.ranks = ranks

    def _gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def _longest(self, length: int) -> int:
        longest = torch.tensor(length)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return int(longest)

    def rows(self, gradient: Tensor) -> Tensor:
        """The sum over ranks, as a dense table of which most rows are zero."""
        gradient = gradient.coalesce()  # adds up what this rank looked up more than once
        numbers, values = gradient.indices()[0], gradient.values()
        missing = self._longest(len(numbers)) - len(numbers)
        numbers = self._gather(F.pad(numbers, (0, missing), value=-1))
        values = self._gather(F.pad(values, (0, 0, 0, missing)))
        present = numbers >= 0
        table = gradient.new_zeros(gradient.shape).to_dense()
        return table.index_copy_(0, numbers[present], values[present])

    def average(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad.is_sparse:
                total = self.rows(parameter.grad)
            else:
                total = parameter.grad.clone()
                dist.all_reduce(total)
            parameter.grad = total / self.ranks


def step(model: nn.Module, shard: dict, rank) -> None:
    loss(model, shard).backward()
    SparseExchange(rank.world_size).average(model)
