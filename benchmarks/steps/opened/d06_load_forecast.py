"""Day-ahead forecasts of electric load with a GRU; windows go through in micro-batches."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


@dataclass
class Config:
    history: int = 12
    horizon: int = 4
    hidden: int = 9
    micro_batch: int = 2  # windows that fit into memory
    sync_every: int = 2  # micro-batches between two exchanges
    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)


CONFIG = Config()
WINDOWS = 12


class Forecaster(nn.Module):
    def __init__(self, config: Config = CONFIG):
        super().__init__()
        self.shape = (config.horizon, len(config.quantiles))
        self.encoder = nn.GRU(2, config.hidden, batch_first=True)
        self.head = nn.Linear(config.hidden, config.horizon * len(config.quantiles))

    def forward(self, history: Tensor) -> Tensor:
        _, last = self.encoder(history)
        return self.head(last[-1]).unflatten(-1, self.shape)


def windows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    steps = torch.arange(CONFIG.history + CONFIG.horizon) / 4
    phase = torch.rand(WINDOWS, 1, generator=generator) * 6
    load = torch.sin(steps + phase) + 0.2 * torch.randn(WINDOWS, len(steps), generator=generator)
    weather = torch.randn(WINDOWS, CONFIG.history, generator=generator)
    return torch.stack([load[:, : CONFIG.history], weather], dim=-1), load[:, CONFIG.history :]


def pinball(forecast: Tensor, actual: Tensor) -> Tensor:
    levels = forecast.new_tensor(CONFIG.quantiles)
    missed = actual.unsqueeze(-1) - forecast
    return torch.maximum(levels * missed, (levels - 1) * missed).mean()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    history, actual = batch
    return pinball(model(history), actual)


case = Case(model=Forecaster, batch=windows, loss=loss, layout="1x2")


class Accumulation:
    """Which micro-batches exchange their gradients, and which only add them up."""

    def __init__(self, ddp: DistributedDataParallel, every: int):
        self.ddp, self.every, self.seen = ddp, every, 0

    def __call__(self) -> contextlib.AbstractContextManager:
        self.seen += 1
        if self.seen % self.every:
            return self.ddp.no_sync()
        return contextlib.nullcontext()


def step(model: nn.Module, shard: tuple[Tensor, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    micro_batches = list(zip(*(part.split(CONFIG.micro_batch) for part in shard)))
    accumulation = Accumulation(ddp, CONFIG.sync_every)
    for micro_batch in micro_batches:
        with accumulation():
            (loss(ddp, micro_batch) / len(micro_batches)).backward()
