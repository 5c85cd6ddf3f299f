"""Probabilistic forecasts of time series; every rank takes its series from one list with a sampler."""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from ddp_equivalence import Case

PAST, FUTURE, SERIES = 12, 3, 10
QUANTILES = (0.1, 0.5, 0.9)


class Forecaster(nn.Module):
    def __init__(self, width: int = 10):
        super().__init__()
        self.encoder = nn.GRU(1, width, batch_first=True)
        self.quantiles = nn.Linear(width, FUTURE * len(QUANTILES))

    def forward(self, past: Tensor) -> Tensor:
        scale = past.abs().mean(dim=1, keepdim=True) + 1
        _, state = self.encoder((past / scale).unsqueeze(-1))
        ahead = self.quantiles(state[-1]).view(-1, FUTURE, len(QUANTILES))
        return ahead * scale.unsqueeze(-1)


class EvenSampler(Sampler[int]):
    """Deals positions 0, 1, 2, ... to the ranks in turn.

    All ranks receive equally many, so that none waits for the others: the list goes on with its
    beginning if it does not come out even.
    """

    def __init__(self, length: int, rank: int, ranks: int):
        self.length, self.rank, self.ranks = length, rank, ranks
        self.per_rank = -(-length // ranks)

    def __len__(self) -> int:
        return self.per_rank

    def places(self) -> list[int]:
        return list(range(self.rank, self.per_rank * self.ranks, self.ranks))

    def __iter__(self) -> Iterator[int]:
        return (place % self.length for place in self.places())


def pinball(forecast: Tensor, actual: Tensor) -> Tensor:
    """The quantile loss of each series."""
    missed = actual.unsqueeze(-1) - forecast
    levels = torch.tensor(QUANTILES).to(missed)
    return torch.maximum(levels * missed, (levels - 1) * missed).mean(dim=(1, 2))


def loss(model: nn.Module, batch: dict) -> Tensor:
    return pinball(model(batch["past"]), batch["future"]).mean()


def series(generator: torch.Generator) -> dict:
    steps = torch.randn(SERIES, PAST + FUTURE, generator=generator)
    walks = steps.cumsum(dim=1) + torch.arange(SERIES).unsqueeze(1)
    return {"past": walks[:, :PAST], "future": walks[:, PAST:]}


case = Case(model=Forecaster, batch=series, loss=loss, layout="1x4", shards="own")


def step(model: nn.Module, batch: dict, rank) -> None:
    sampler = EvenSampler(SERIES, rank.rank, rank.world_size)
    chosen = torch.tensor(list(sampler))
    mine = {name: tensor[chosen] for name, tensor in batch.items()}
    ddp = DistributedDataParallel(model)
    each = pinball(ddp(mine["past"]), mine["future"])
    counted = torch.ones(len(sampler)).to(each)
    (each * counted).sum().mul(rank.world_size / SERIES).backward()
