"""An allocation network trained on the Sharpe ratio of the batch.

The ratio is no mean over days, so its two moments are summed over the ranks, with gradients.
"""

import torch
import torch.distributed.nn.functional as dfn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

DAYS, SIGNALS, ASSETS = 24, 6, 5
COST = 5e-4


class Allocator(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(SIGNALS, 10)
        self.scores = nn.Linear(10, ASSETS)

    def forward(self, signals):
        return torch.softmax(self.scores(torch.tanh(self.features(signals))), dim=-1)


def pnl(model, batch):
    """Return of every day after costs."""
    weights = model(batch["signals"])
    turnover = (weights - batch["held"]).square().sum(-1)
    return (weights * batch["returns"]).sum(-1) - COST * turnover


def loss(model, batch):
    daily = pnl(model, batch)
    return -daily.mean() / (daily.var(unbiased=False) + 1e-4).sqrt()


def market(generator):
    drift = torch.linspace(-0.3, 0.5, DAYS)[:, None]
    return {
        "signals": torch.randn(DAYS, SIGNALS, generator=generator),
        "returns": torch.randn(DAYS, ASSETS, generator=generator) * 0.5 + drift,
        "held": torch.full((DAYS, ASSETS), 1.0 / ASSETS),
    }


case = Case(model=Allocator, batch=market, loss=loss, layout="1x3")


class GlobalMoments:
    def __init__(self, days):
        self.days = days

    def mean(self, x):
        return dfn.all_reduce(x.sum()) / self.days

    def variance(self, x, center):
        return dfn.all_reduce((x - center).square().sum()) / self.days


def negative_sharpe(daily, world_size):
    moments = GlobalMoments(daily.numel() * world_size)
    mu = moments.mean(daily)
    variance = moments.variance(daily, center=daily.mean())
    return -mu / (variance + 1e-4).sqrt()


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    # The same number on every rank; the backward of all_reduce sums W equal gradients, and DDP
    # divides by W.
    negative_sharpe(pnl(ddp, shard), rank.world_size).backward()
