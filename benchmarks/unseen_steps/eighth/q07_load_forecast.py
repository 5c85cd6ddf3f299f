"""Forecast of the electric load of tomorrow, with a warm-up and a decay of the learning rate."""

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

HOURS, AHEAD = 24, 6
WARMUP, TOTAL = 2, 12
STEPS = 4


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.season = nn.Parameter(torch.zeros(HOURS))
        self.net = nn.Sequential(nn.Linear(HOURS, 20), nn.Softplus(), nn.Linear(20, AHEAD))

    def forward(self, history):
        return self.net(history - self.season)


def histories(generator):
    n = 8 * STEPS
    t = torch.arange(HOURS + AHEAD) / 24 * 2 * math.pi
    phase = torch.rand(n, 1, generator=generator)
    series = torch.sin(t + phase) + 0.1 * torch.randn(n, HOURS + AHEAD, generator=generator)
    return {"history": series[:, :HOURS], "future": series[:, HOURS:]}


def pinball(guess, truth, quantile=0.7):
    error = truth - guess
    return torch.maximum(quantile * error, (quantile - 1) * error).mean()


def loss(model, batch):
    return pinball(model(batch["history"]), batch["future"])


def factor(iteration):
    if iteration < WARMUP:
        return (iteration + 1) / (WARMUP + 1)
    progress = (iteration - WARMUP) / (TOTAL - WARMUP)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def make_optimizer(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9, nesterov=True)
    return [optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)]


class PreparedScheduler:
    """Steps a scheduler when the optimizer does; the loaders are split over the processes."""

    def __init__(self, scheduler, processes):
        self.scheduler, self.processes = scheduler, processes

    def step(self):
        for _ in range(self.processes):
            self.scheduler.step()

    @property
    def lr(self):
        return self.scheduler.get_last_lr()[0]


class Loop:
    def __init__(self, model, rank):
        self.ddp = DistributedDataParallel(model)
        self.optimizer, scheduler = make_optimizer(self.ddp.parameters())
        self.scheduler = PreparedScheduler(scheduler, rank.world_size)
        self.log = []

    def __call__(self, shard):
        self.optimizer.zero_grad()
        value = loss(self.ddp, shard)
        value.backward()
        self.optimizer.step()
        self.log.append((self.scheduler.lr, value.item()))
        self.scheduler.step()


case = Case(model=Forecaster, batch=histories, loss=loss, layout="1x2")
step = Loop
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
