"""SwAV: swapped prediction of prototype assignments that Sinkhorn-Knopp balances over the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class SwAVConfig:
    inputs: int = 10
    embed: int = 8
    prototypes: int = 6
    epsilon: float = 0.25
    iterations: int = 3
    temperature: float = 0.2


CONFIG = SwAVConfig()
EXAMPLES = 16


class SwAV(nn.Module):
    def __init__(self, config: SwAVConfig = CONFIG) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(config.inputs, 16), nn.ReLU(), nn.Linear(16, config.embed)
        )
        self.prototypes = nn.Linear(config.embed, config.prototypes, bias=False)

    def forward(self, x):
        return self.prototypes(F.normalize(self.encoder(x), dim=1))


def sum_over_ranks(mass: torch.Tensor) -> torch.Tensor:
    mass = mass.contiguous()
    dist.all_reduce(mass)
    return mass


class SinkhornKnopp:
    """Soft assignments with equal mass per prototype and mass one per sample."""

    def __init__(self, config: SwAVConfig, reduce: Callable, world_size: int) -> None:
        self.config = config
        self.reduce = reduce
        self.world_size = world_size

    @torch.no_grad()
    def __call__(self, scores):
        assignment = torch.exp(scores / self.config.epsilon)
        samples = assignment.shape[0] * self.world_size
        prototypes = assignment.shape[1]
        assignment /= self.reduce(assignment.sum())
        for _ in range(self.config.iterations):
            assignment /= assignment.sum(dim=0, keepdim=True)
            assignment /= prototypes
            assignment /= self.reduce(assignment.sum(dim=1, keepdim=True))
            assignment /= samples
        return assignment * samples


def swapped_prediction(scores_a, scores_b, sinkhorn, config: SwAVConfig = CONFIG):
    def predict(scores, target):
        return -(target * F.log_softmax(scores / config.temperature, dim=1)).sum(1).mean()

    return (predict(scores_a, sinkhorn(scores_b)) + predict(scores_b, sinkhorn(scores_a))) / 2


def make_batch(generator):
    clean = torch.randn(EXAMPLES, CONFIG.inputs, generator=generator)
    noise = torch.randn(2, EXAMPLES, CONFIG.inputs, generator=generator)
    return {"crop_a": clean + 0.3 * noise[0], "crop_b": clean + 0.3 * noise[1]}


def swav_loss(model, batch):
    sinkhorn = SinkhornKnopp(CONFIG, reduce=lambda mass: mass, world_size=1)
    return swapped_prediction(model(batch["crop_a"]), model(batch["crop_b"]), sinkhorn)


case = Case(model=SwAV, batch=make_batch, loss=swav_loss, layout="1x2")


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    sinkhorn = SinkhornKnopp(CONFIG, reduce=sum_over_ranks, world_size=dist.get_world_size())
    scores = ddp(torch.cat([shard["crop_a"], shard["crop_b"]]))
    swapped_prediction(*scores.chunk(2), sinkhorn).backward()
