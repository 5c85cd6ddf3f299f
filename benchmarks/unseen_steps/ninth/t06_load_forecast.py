"""Day-ahead load forecasting: a GRU whose states are whitened over the whole batch."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SERIES, HOURS, HORIZON = 16, 12, 4


class Whiten(nn.Module):
    """Standardises every feature over the batch, of all ranks if there are any to talk to."""

    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features))
        self.eps = eps
        self.world_size = 1

    def total(self, value):
        return dist_fn.all_reduce(value) if self.world_size > 1 else value

    def forward(self, h):
        count = len(h) * self.world_size
        mean = self.total(h.sum(0)) / count
        spread = (h - h.mean(0)).square().sum(0)
        variance = self.total(spread) / count
        return self.gain * (h - mean) / (variance + self.eps).sqrt() + self.shift


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(1, 8, batch_first=True)
        self.whiten = Whiten(8)
        self.horizon = nn.Sequential(nn.Tanh(), nn.Linear(8, HORIZON))

    def forward(self, load):
        _, last = self.recurrent(load.unsqueeze(-1))
        return self.horizon(self.whiten(last[0]))


def regions(generator):
    # stations of the same region stand together, and regions differ in level
    level = torch.linspace(-2, 2, SERIES)[:, None]
    return {
        "load": level + torch.randn(SERIES, HOURS, generator=generator),
        "ahead": level + torch.randn(SERIES, HORIZON, generator=generator),
    }


def pinball(error, quantile=0.7):
    return torch.maximum(quantile * error, (quantile - 1) * error).mean()


def loss(model, batch):
    return pinball(batch["ahead"] - model(batch["load"]))


def spread_over_ranks(model):
    for module in model.modules():
        if isinstance(module, Whiten):
            module.world_size = dist.get_world_size()
    return model


def step(model, shard, rank):
    ddp = DistributedDataParallel(spread_over_ranks(model))
    loss(ddp, shard).backward()


case = Case(model=Forecaster, batch=regions, loss=loss, layout="1x2")
