"""Photometric redshifts with a scaled loss, as for half precision. Scales are powers of two."""

import math

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

GALAXIES, BANDS = 16, 5
TARGET = 1024.0  # where the scaled loss should lie


class Redshift(nn.Module):
    """A mixture of two normal densities per galaxy."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(BANDS, 20), nn.Mish())
        self.weight, self.mean, self.log_sigma = (nn.Linear(20, 2) for _ in range(3))

    def forward(self, bands):
        hidden = self.body(bands)
        return self.weight(hidden).log_softmax(-1), self.mean(hidden), self.log_sigma(hidden)


def make_batch(generator):
    redshift = torch.linspace(0.05, 6, GALAXIES)  # a catalogue is sorted
    bands = torch.randn(GALAXIES, BANDS, generator=generator) + redshift[:, None].sin()
    return {"bands": bands, "redshift": redshift}


def loss(model, batch):
    log_weight, mean, log_sigma = model(batch["bands"])
    normal = (batch["redshift"][:, None] - mean) * (-log_sigma).exp()
    return -(log_weight - 0.5 * normal.square() - log_sigma).logsumexp(-1).mean()


class Scaler:
    def __init__(self, scale=2.0**10):
        self.scale = scale

    def adapt(self, value):
        """The largest power of two with which the loss stays below the target."""
        self.scale = 2.0 ** math.floor(math.log2(TARGET / max(abs(value), 1e-6)))

    def scaled(self, value):
        return value * self.scale

    def unscale_(self, parameters):
        for parameter in parameters:
            parameter.grad.div_(self.scale)


def all_reduce_mean(parameters, world_size):
    works = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
    for parameter, work in zip(parameters, works):
        work.wait()
        parameter.grad.div_(world_size)


def step(model, shard, rank):
    parameters = list(model.parameters())
    scaler = Scaler()
    value = loss(model, shard)
    scaler.adapt(value.item())
    scaler.scaled(value).backward()
    # The sum is made of scaled gradients, where small ones are not lost.
    all_reduce_mean(parameters, rank.world_size)
    scaler.unscale_(parameters)


case = Case(model=Redshift, batch=make_batch, loss=loss, layout="1x2")
