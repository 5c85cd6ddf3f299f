"""Linear warm-up for an optimizer whose states are sharded over the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, LinearLR

from ddp_equivalence import Case, Rank

CHANNELS, ROWS_PER_STEP, STEPS = 9, 16, 3


@dataclass(frozen=True)
class Recipe:
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.4, "momentum": 0.9})
    warm_up: dict[str, Any] = field(
        default_factory=lambda: {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 4}
    )

    def in_one_process(self, parameters: list[nn.Parameter]) -> list[Any]:
        optimizer = torch.optim.SGD(parameters, **self.settings)
        return [optimizer, LinearLR(optimizer, **self.warm_up)]


RECIPE = Recipe()


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(CHANNELS, 6), nn.Tanh(), nn.Linear(6, 3))
        self.up = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def make_batch(generator: torch.Generator) -> Tensor:
    factors = torch.randn(STEPS * ROWS_PER_STEP, 3, generator=generator)
    return factors @ torch.randn(3, CHANNELS, generator=generator)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().sum(-1).mean()


class ShardedTrainer:
    """Owns a replica, this rank's part of the optimizer, and the schedule."""

    optimizer: ZeroRedundancyOptimizer
    scheduler: LRScheduler

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.replica = DistributedDataParallel(model)
        self.build_optimizer(recipe)

    def build_optimizer(self, recipe: Recipe) -> None:
        self.optimizer = ZeroRedundancyOptimizer(
            self.replica.parameters(), optimizer_class=torch.optim.SGD, **recipe.settings
        )
        # Schedulers look into the state of the optimizer, which is that of the local one.
        self.scheduler = LinearLR(self.optimizer.optim, **recipe.warm_up)

    def fit(self, batches: list[Tensor]) -> None:
        for batch in batches:
            self.optimizer.zero_grad()
            loss(self.replica, batch).backward()
            self.optimizer.step()
            self.scheduler.step()


def step(model: nn.Module, batch: Tensor, rank: Rank) -> None:
    steps = batch.split(ROWS_PER_STEP)
    mine = [rows.tensor_split(rank.world_size)[rank.rank] for rows in steps]
    ShardedTrainer(model, RECIPE).fit(mine)


case = Case(model=Autoencoder, batch=make_batch, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "optimizer": RECIPE.in_one_process, "steps": STEPS}
