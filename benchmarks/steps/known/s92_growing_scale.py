"""Mixed-precision trainer with a loss scale that grows while gradients stay finite."""

import contextlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 9), nn.SiLU(), nn.Linear(9, 9), nn.SiLU())
        self.mean = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mean(self.body(x))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch["x"]), batch["y"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(24, 7, generator=generator),
        "y": torch.randn(24, 2, generator=generator),
    }


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="1x2")


class LossScaler:
    def __init__(self, scale: float = 256.0, growth_interval: int = 2) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0

    def scaled(self, value: Tensor) -> Tensor:
        return value * self.scale

    def finite_everywhere(self, parameters: Iterable[nn.Parameter]) -> bool:
        finite = torch.stack([p.grad.isfinite().all() for p in parameters]).all().double()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    def unscale_(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            p.grad.div_(self.scale)

    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        if not self.finite_everywhere(parameters):
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps % self.growth_interval == 0:
            self.scale *= 2


class Trainer:
    def __init__(self, model: nn.Module, accumulation: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.parameters = list(model.parameters())
        self.scaler = LossScaler()
        self.accumulation = accumulation

    def run(self, batch: dict[str, Tensor]) -> None:
        for index in range(self.accumulation):
            micro_batch = {key: value[index :: self.accumulation] for key, value in batch.items()}
            last = index + 1 == self.accumulation
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                value = loss(self.ddp, micro_batch) / self.accumulation
                self.scaler.scaled(value).backward()
            self.scaler.update(self.parameters)
        self.scaler.unscale_(self.parameters)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Trainer(model, accumulation=3).run(shard)
