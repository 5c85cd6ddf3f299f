"""Fourier-like neural operator for Darcy flow (real cosine modes); gradients are summed by module,
so that we can time each module's communication."""

import math
import time

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

GRID, MODES, CHANNELS = 12, 4, 5


def cosines(dtype):
    k = torch.arange(MODES, dtype=dtype)[:, None]
    x = torch.arange(GRID, dtype=dtype)[None] + 0.5
    basis = torch.cos(math.pi * k * x / GRID)
    return basis / basis.norm(dim=1, keepdim=True)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(MODES, CHANNELS, CHANNELS) / CHANNELS)
        self.pointwise = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x):
        basis = cosines(x.dtype)
        spectrum = torch.einsum("kg,bgc->bkc", basis, x)
        spectrum = torch.einsum("bkc,kcd->bkd", spectrum, self.modes)
        return torch.einsum("kg,bkd->bgd", basis, spectrum) + self.pointwise(x)


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(1, CHANNELS)
        self.layers = nn.ModuleList([Spectral(), Spectral()])
        self.project = nn.Linear(CHANNELS, 1)

    def forward(self, permeability):
        x = self.lift(permeability[..., None])
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.project(x).squeeze(-1)


def relative_l2(model, batch):
    error = (model(batch["permeability"]) - batch["pressure"]).norm(dim=1)
    return (error / batch["pressure"].norm(dim=1)).mean()


def darcy(generator):
    permeability = torch.rand(8, GRID, generator=generator) + 0.1
    return {"permeability": permeability, "pressure": (1 / permeability).cumsum(1) / GRID}


case = Case(model=Operator, batch=darcy, loss=relative_l2, layout="1x2")


class TimedReduction:
    def __init__(self):
        self.seconds = {}

    def sum_module(self, name, module):
        start = time.perf_counter()
        for p in module.parameters():
            dist.all_reduce(p.grad)
        self.seconds[name] = time.perf_counter() - start

    def __call__(self, model):
        for name, module in model.named_modules():
            self.sum_module(name, module)
        for p in model.parameters():
            p.grad /= dist.get_world_size()


def step(model, shard, rank):
    relative_l2(model, shard).backward()
    TimedReduction()(model)
