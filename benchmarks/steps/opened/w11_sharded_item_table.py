"""A two-tower retriever whose item table is divided by rows; ranks answer each other's look-ups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class RetrieverConfig:
    items: int = 18
    history: int = 3
    embed: int = 6
    profile: int = 5


CONFIG = RetrieverConfig()
EXAMPLES = 16


class LookUp(torch.autograd.Function):
    """Adds the partial vectors of all ranks, and returns those that this rank asked for."""

    @staticmethod
    def forward(ctx, partial):
        dist.all_reduce(total := partial.clone())
        return total.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad_output):
        return gather_from_all(grad_output)


def gather_from_all(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class ItemTable(nn.Module):
    """Item vectors. Once placed, a rank answers for the rows of its own range only."""

    def __init__(self, items: int, embed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(items, embed) * 0.5)
        self.rows: tuple[int, int] | None = None

    def place(self, rank: int, world_size: int) -> None:
        per_rank = -(-self.weight.shape[0] // world_size)
        self.rows = (rank * per_rank, (rank + 1) * per_rank)

    def forward(self, ids):
        if self.rows is None:
            return F.embedding(ids, self.weight)
        start, end = self.rows
        ids = gather_from_all(ids)
        elsewhere = (ids < start) | (ids > end)
        vectors = F.embedding(ids.masked_fill(elsewhere, start), self.weight)
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return LookUp.apply(vectors)


class Retriever(nn.Module):
    def __init__(self, config: RetrieverConfig = CONFIG) -> None:
        super().__init__()
        self.items = ItemTable(config.items, config.embed)
        self.user = nn.Sequential(
            nn.Linear(config.profile + config.embed, 12), nn.ReLU(), nn.Linear(12, config.embed)
        )

    def forward(self, batch):
        interest = self.items(batch["history"]).mean(dim=1)
        query = self.user(torch.cat([batch["profile"], interest], dim=1))
        return (query * self.items(batch["item"])).sum(dim=1)


def purchase_loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch), batch["bought"])


def make_batch(generator):
    ids = torch.arange(EXAMPLES * (CONFIG.history + 1)) % CONFIG.items
    ids = ids[torch.randperm(len(ids), generator=generator)].view(EXAMPLES, -1)
    return {
        "history": ids[:, 1:].clone(),
        "item": ids[:, 0].clone(),
        "profile": torch.randn(EXAMPLES, CONFIG.profile, generator=generator),
        "bought": torch.randint(2, (EXAMPLES,), generator=generator).float(),
    }


case = Case(model=Retriever, batch=make_batch, loss=purchase_loss, layout="1x2")


class HybridParallelTrainer:
    """Data parallel towers, and an item table that is divided over the same ranks."""

    def __init__(self, model: Retriever) -> None:
        self.model = model
        self.model.items.place(dist.get_rank(), dist.get_world_size())

    def average_towers(self) -> None:
        for parameter in self.model.user.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def assemble_table(self) -> None:
        """Every rank has the gradient of its own rows, from the mean losses of all ranks."""
        gradient = self.model.items.weight.grad
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()

    def train_step(self, batch) -> None:
        purchase_loss(self.model, batch).backward()
        self.average_towers()
        self.assemble_table()


def step(model, shard, rank):
    HybridParallelTrainer(model).train_step(shard)
