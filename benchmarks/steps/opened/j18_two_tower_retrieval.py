"""Retrieval with two towers: the items that others in the batch chose are the negatives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

QUERY, ITEM, SHARED = 7, 5, 6


def tower(inside: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, 12), nn.GELU(), nn.Linear(12, SHARED))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.item = tower(QUERY), tower(ITEM)
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, query: Tensor, item: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = F.normalize(self.query(query), dim=1)
        item = F.normalize(self.item(item), dim=1)
        return query, item, self.log_temperature.exp()


class SampledSoftmax:
    """Cross-entropy over the items of the batch, corrected by how often each item is sampled."""

    def __init__(self, gather=None):
        self.gather = gather

    def logits(self, query: Tensor, item: Tensor, temperature: Tensor, frequency: Tensor):
        if self.gather is not None:
            item, frequency = self.gather(item), self.gather(frequency)
        return query @ item.T / temperature - frequency.log()

    def __call__(self, model: nn.Module, batch: dict) -> Tensor:
        query, item, temperature = model(batch["query"], batch["item"])
        logits = self.logits(query, item, temperature, batch["frequency"])
        chosen = torch.arange(len(logits), device=logits.device)
        return F.cross_entropy(logits, chosen)


def loss(model: nn.Module, batch: dict) -> Tensor:
    return SampledSoftmax()(model, batch)


def sessions(generator: torch.Generator) -> dict:
    return {
        "query": torch.randn(12, QUERY, generator=generator),
        "item": torch.randn(12, ITEM, generator=generator),
        "frequency": 0.05 + torch.rand(12, generator=generator),
    }


case = Case(model=TwoTowers, batch=sessions, loss=loss, layout="1x2")


def from_all_ranks(tensor: Tensor) -> Tensor:
    """Gradients flow back to the rank that a row came from."""
    return torch.cat(all_gather(tensor), dim=0)


def step(model: nn.Module, shard: dict, rank) -> None:
    ddp = DistributedDataParallel(model)
    objective = SampledSoftmax(gather=from_all_ranks)
    objective(ddp, shard).backward()
    dist.barrier()
