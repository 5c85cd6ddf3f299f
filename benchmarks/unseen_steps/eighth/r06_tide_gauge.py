"""Tide gauges: forecasts are scored relative to the spread of the levels in the batch."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

GAUGES, HISTORY, AHEAD = 12, 16, 4


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.trend = nn.Linear(HISTORY, AHEAD)
        self.season = nn.Sequential(nn.Linear(HISTORY, 8), nn.SiLU(), nn.Linear(8, AHEAD))

    def forward(self, history):
        last = history[:, -1:]
        return last + self.trend(history - last) + self.season(history - last)


def make_batch(generator):
    # the gauges are listed along the coast, and the tidal range grows to the east
    scale = torch.linspace(0.3, 4.0, GAUGES)[:, None]
    level = torch.linspace(-2.0, 6.0, GAUGES)[:, None]
    series = level + scale * torch.randn(GAUGES, HISTORY + AHEAD, generator=generator)
    return {"history": series[:, :HISTORY].clone(), "future": series[:, HISTORY:].clone()}


def huber(error):
    return torch.where(error.abs() < 1.0, 0.5 * error**2, error.abs() - 0.5)


def loss(model, batch):
    spread = batch["future"].std(unbiased=False)
    error = (model(batch["history"]) - batch["future"]) / spread
    return huber(error).mean()


def mean_over_ranks(value):
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def spread_of_all(future):
    """Every rank has the same number of levels, so means of means are means."""
    middle = mean_over_ranks(future.mean())
    return mean_over_ranks((future - middle).square().mean().sqrt())


def register_reduction(model):
    def reduce_after(parameter):
        parameter.grad = mean_over_ranks(parameter.grad)

    return [p.register_post_accumulate_grad_hook(reduce_after) for p in model.parameters()]


def step(model, shard, rank):
    handles = register_reduction(model)
    spread = spread_of_all(shard["future"])
    error = (model(shard["history"]) - shard["future"]) / spread
    huber(error).mean().backward()
    for handle in handles:
        handle.remove()


case = Case(model=Forecaster, batch=make_batch, loss=loss, layout="1x2")
