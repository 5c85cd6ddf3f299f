"""One-step-ahead forecasting: the ranks share one long series and cut sliding windows from it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class ForecastConfig:
    length: int = 24
    channels: int = 2
    context: int = 4
    hidden: int = 8

    @property
    def windows(self):
        return self.length - self.context


CFG = ForecastConfig()


class Forecaster(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.encoder = nn.GRU(cfg.channels, cfg.hidden, batch_first=True)
        self.head = nn.Linear(cfg.hidden, cfg.channels)

    def forward(self, past):
        _, hidden = self.encoder(past)
        return past[:, -1] + self.head(hidden[-1])


def sliding_windows(series, context):
    """(time, channels) -> past (windows, context, channels), next (windows, channels)"""
    frames = series.unfold(0, context + 1, 1).transpose(1, 2)
    return frames[:, :context], frames[:, context]


def summed_error(model, series, cfg):
    past, target = sliding_windows(series, cfg.context)
    return F.huber_loss(model(past), target, reduction="sum", delta=0.5)


def series_loss(model, batch):
    return summed_error(model, batch["series"], CFG) / CFG.windows


class SeriesShard:
    """Consecutive part of the series from which one rank cuts its windows."""

    def __init__(self, cfg, rank, world_size):
        self.cfg = cfg
        per_rank, left = divmod(cfg.windows, world_size)
        self.first = rank * per_rank + min(rank, left)
        self.last = self.first + per_rank + (1 if rank < left else 0)

    def __call__(self, series):
        return series[self.first : self.last]


class ForecastTrainer:
    def __init__(self, model, cfg=CFG):
        self.cfg = cfg
        self.ddp = DistributedDataParallel(model)
        self.world_size = dist.get_world_size()
        self.take = SeriesShard(cfg, dist.get_rank(), self.world_size)

    def train_step(self, batch):
        part = self.take(batch["series"])
        error = summed_error(self.ddp, part, self.cfg)
        loss = error * self.world_size / self.cfg.windows
        loss.backward()
        return loss.item()


def make_batch(generator):
    time = torch.arange(CFG.length, dtype=torch.float64)
    season = torch.stack([torch.sin(0.7 * time), torch.cos(0.4 * time)], dim=1)
    noise = torch.randn(CFG.length, CFG.channels, generator=generator)
    return {"series": season + 0.3 * noise}


case = Case(model=Forecaster, batch=make_batch, loss=series_loss, layout="1x2", shards="own")


def step(model, batch, rank):
    ForecastTrainer(model).train_step(batch)
