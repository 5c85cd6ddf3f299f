"""Gene expression: the hidden units are standardised over the cells of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

GENES, TYPES, EPS = 10, 4, 1e-3


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Alone:
    """Moments over the cells of this process."""

    def mean(self, x):
        return x.mean(0)

    def variance(self, x, mean):
        return (x - mean).square().mean(0)


class Together(Alone):
    """Moments over the cells of all processes, which have equally many."""

    def __init__(self, world_size):
        self.world_size = world_size

    def mean(self, x):
        return Sum.apply(super().mean(x)) / self.world_size

    def variance(self, x, mean):
        return Sum.apply(super().variance(x, x.mean(0))) / self.world_size


class Standardise(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.moments = Alone()

    def forward(self, x):
        mean = self.moments.mean(x)
        variance = self.moments.variance(x, mean)
        return (x - mean) * (variance + EPS).rsqrt() * self.gain + self.shift


class CellTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(GENES, 12), Standardise(12), nn.ReLU(), nn.Linear(12, TYPES)
        )

    def forward(self, counts):
        return self.layers(counts.log1p())


def cells(generator):
    n = 16
    depth = torch.linspace(0.5, 9, n)[:, None]  # in the order of their sequencing depth
    return {
        "counts": torch.rand(n, GENES, generator=generator) * depth,
        "types": torch.randint(0, TYPES, (n,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["counts"]), batch["types"])


def convert(module, world_size):
    for child in module.modules():
        if isinstance(child, Standardise):
            child.moments = Together(world_size)
    return module


def step(model, shard, rank):
    ddp = DistributedDataParallel(convert(model, rank.world_size))
    loss(ddp, shard).backward()


case = Case(model=CellTypes, batch=cells, loss=loss, layout="1x2")
