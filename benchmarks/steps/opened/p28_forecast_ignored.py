"""Forecasting with trend and season split off; the sinusoidal table is frozen and kept out of DDP."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PAST, FUTURE, WIDTH = 12, 4, 8


class Decomposer(nn.Module):
    """A learned moving average: the trend; what remains is the season."""

    def __init__(self):
        super().__init__()
        self.window = nn.Parameter(torch.ones(5) / 5 + 0.05 * torch.randn(5))

    def forward(self, series):
        padded = F.pad(series.unsqueeze(1), (2, 2), mode="replicate")
        trend = F.conv1d(padded, self.window.view(1, 1, -1)).squeeze(1)
        return trend, series - trend


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        t = torch.arange(PAST).unsqueeze(1)
        rate = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(100.0) / WIDTH))
        table = torch.cat([torch.sin(t * rate), torch.cos(t * rate)], dim=1)
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, x):
        return x + self.table


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.decomposer = Decomposer()
        self.pos = Positions()
        self.embed = nn.Linear(1, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.season = nn.Linear(PAST * WIDTH, FUTURE)
        self.trend = nn.Linear(PAST, FUTURE)

    def forward(self, series):
        trend, season = self.decomposer(series)
        hidden = torch.tanh(self.mix(self.pos(self.embed(season.unsqueeze(-1)))))
        return self.trend(trend) + self.season(hidden.flatten(1))


def windows(generator):
    walk = torch.randn(16, PAST + FUTURE, generator=generator).cumsum(dim=1)
    return {"past": walk[:, :PAST].contiguous(), "future": walk[:, PAST:].contiguous()}


def loss(model, batch):
    return F.huber_loss(model(batch["past"]), batch["future"])


def wrap(model):
    fixed = [name for name, _ in model.named_parameters() if "pos" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, fixed)
    return DistributedDataParallel(model)


def step(model, shard, rank):
    ddp = wrap(model)
    loss(ddp, shard).backward()


case = Case(model=Forecaster, batch=windows, loss=loss, layout="1x2")
