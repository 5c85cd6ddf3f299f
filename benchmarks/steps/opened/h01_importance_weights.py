"""Click-through rate with logged propensities: rows weigh 1 / p, and the weights are made to average one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    users: int = 24
    items: int = 30
    width: int = 6
    rows: int = 16
    floor: float = 0.05


CFG = Config()


class TwoTower(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.user = nn.Embedding(cfg.users, cfg.width)
        self.item = nn.Embedding(cfg.items, cfg.width)
        self.mix = nn.Linear(cfg.width, cfg.width)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user, item):
        return (torch.tanh(self.mix(self.user(user))) * self.item(item)).sum(-1) + self.bias


class Weights:
    """Inverse propensities, clipped, with mean one."""

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def raw(self, propensity):
        return propensity.clamp(min=self.floor).reciprocal()

    def centre(self, weights):
        return weights.mean()

    def __call__(self, propensity):
        weights = self.raw(propensity)
        return weights / self.centre(weights)


class SharedWeights(Weights):
    """The same for rows that are spread over ranks."""

    def centre(self, weights):
        middle = super().centre(weights)
        everywhere = [torch.empty_like(middle) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, middle)
        return torch.stack(everywhere).max()


def weighted_clicks(model, batch, weights: Weights):
    logits = model(batch["user"], batch["item"])
    each = F.binary_cross_entropy_with_logits(logits, batch["clicked"], reduction="none")
    return (weights(batch["propensity"]) * each).mean()


def loss(model, batch):
    return weighted_clicks(model, batch, Weights(CFG.floor))


def impressions(generator):
    g = generator
    return {
        "user": torch.randint(0, CFG.users, (CFG.rows,), generator=g),
        "item": torch.randint(0, CFG.items, (CFG.rows,), generator=g),
        "clicked": torch.randint(0, 2, (CFG.rows,), generator=g).double(),
        "propensity": torch.rand(CFG.rows, generator=g, dtype=torch.double) ** 2,
    }


case = Case(model=lambda: TwoTower(CFG), batch=impressions, loss=loss, layout="2x2")


def step(model, shard, rank):
    ddp = nn.parallel.DistributedDataParallel(model)
    weighted_clicks(ddp, shard, SharedWeights(CFG.floor)).backward()
