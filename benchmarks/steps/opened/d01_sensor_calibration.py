"""Calibration of gas sensors. Readings carry inverse-variance weights from the metrology lab.

The fit must not depend on how the readings are dealt to the workers, so the weighted mean is
taken over the weights of everyone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

CHANNELS = 6
GASES = 3


class Calibrator(nn.Module):
    """A quadratic response with a small learned correction for temperature."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(CHANNELS, GASES)
        self.quadratic = nn.Linear(CHANNELS, GASES, bias=False)
        self.temperature = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, GASES))

    def forward(self, volts: Tensor, celsius: Tensor) -> Tensor:
        return self.linear(volts) + self.quadratic(volts.square()) + self.temperature(celsius)


def make_batch(generator):
    volts = torch.rand(20, CHANNELS, generator=generator)
    celsius = torch.randn(20, 1, generator=generator)
    ppm = torch.randn(20, GASES, generator=generator)
    sigma = 0.2 + torch.rand(20, generator=generator) * 2
    return {"volts": volts, "celsius": celsius, "ppm": ppm, "weight": sigma**-2}


def squared_errors(model, batch):
    return (model(batch["volts"], batch["celsius"]) - batch["ppm"]).square().sum(dim=1)


def loss(model, batch):
    weight = batch["weight"]
    return (weight * squared_errors(model, batch)).sum() / weight.sum()


case = Case(model=Calibrator, batch=make_batch, loss=loss, layout="1x2")


# ---------------------------------------------------------------- the parallel part


def total_mass(weight: Tensor) -> Tensor:
    """The sum of the weights of all workers."""
    mass = weight.sum().detach()
    dist.all_reduce(mass.clone(), op=dist.ReduceOp.SUM)
    return mass


def step(model, shard, rank):
    ddp = DDP(model)
    weighted = (shard["weight"] * squared_errors(ddp, shard)).sum()
    # DDP takes the mean over the workers; we want their sum over the common mass.
    objective = weighted * rank.world_size / total_mass(shard["weight"])
    objective.backward()
