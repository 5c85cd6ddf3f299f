"""Loss scaling: small losses are scaled up before the backward pass, to keep gradients in range."""

import math

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 8)
        self.decode = nn.Linear(8, 2)

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_batch(generator):
    # Later readings come from a larger plant.
    size = torch.cat([torch.full((6, 1), 0.5), torch.full((6, 1), 9.0)])
    return {
        "x": torch.randn(12, 6, generator=generator),
        "y": size * torch.randn(12, 2, generator=generator),
    }


case = Case(model=Forecaster, batch=make_batch, loss=loss, layout="1x2")


def largest_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


class PowerOfTwoScaler:
    """Brings the largest loss of all ranks close to 2 ** ceiling."""

    def __init__(self, ceiling=10):
        self.ceiling = ceiling
        self.scale = 1.0

    def fit(self, value):
        self.scale = 2.0 ** (self.ceiling - math.ceil(math.log2(value.item())))

    def backward(self, value):
        peak = largest_over_ranks(value)
        if not torch.isfinite(peak):
            raise FloatingPointError("the loss of some rank is not finite")
        self.fit(value)
        (value * self.scale).backward()

    def unscale(self, params):
        for p in params:
            p.grad /= self.scale


def step(model, shard, rank):
    scaler = PowerOfTwoScaler()
    params = list(model.parameters())
    model.zero_grad()
    scaler.backward(loss(model, shard))
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= rank.world_size
    scaler.unscale(params)
