"""Concentrations from infrared spectra, with batch statistics that all ranks share."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class CrossRankNorm(nn.Module):
    """Normalises by mean and variance of the batch, of all ranks while they train together."""

    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features))
        self.eps = eps
        self.across = False

    def average(self, value):
        if not self.across:
            return value
        return all_reduce(value.clone()) / dist.get_world_size()

    def forward(self, x):
        mean = self.average(x.mean(0))
        var = self.average(x.var(0, unbiased=False))
        return (x - mean) / torch.sqrt(var + self.eps) * self.gain + self.shift


class Spectrometer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(14, 8)
        self.norm = CrossRankNorm(8)
        self.read = nn.Linear(8, 2)

    def forward(self, spectrum):
        return self.read(F.softplus(self.norm(self.project(spectrum))))


def spectra(generator):
    drift = torch.linspace(-1.5, 1.5, 12)[:, None]
    return {
        "spectrum": torch.randn(12, 14, generator=generator) + drift,
        "concentration": torch.rand(12, 2, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["spectrum"]), batch["concentration"])


def step(model, shard, rank):
    for module in model.modules():
        if isinstance(module, CrossRankNorm):
            module.across = True
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    loss(ddp, shard).backward()


case = Case(model=Spectrometer, batch=spectra, loss=loss, layout="1x2")
