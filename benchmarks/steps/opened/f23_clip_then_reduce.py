"""Volatility forecasts with a GRU. Compared by how far one step moves the weights."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

WINDOW, SERIES, MAX_NORM, LR = 6, 3, 0.1, 0.05


class Volatility(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(SERIES, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, returns):
        states, _ = self.gru(returns)
        return self.head(states[:, -1]).squeeze(-1)


def qlike(model, batch):
    """QLIKE: the usual loss for forecasts of a variance."""
    log_variance = model(batch["returns"])
    return (batch["realised"] * (-log_variance).exp() + log_variance).mean()


def windows(generator):
    level = torch.linspace(0.2, 3.0, 12)
    returns = torch.randn(12, WINDOW, SERIES, generator=generator) * level[:, None, None]
    return {"returns": returns, "realised": returns.square().mean((1, 2)) + level}


case = Case(model=Volatility, batch=windows, loss=qlike, layout="1x2")


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR)


options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM, "steps": 1}


class Loop:
    def __init__(self, model, world_size):
        self.parameters = list(model.parameters())
        self.world_size = world_size
        self.optimizer = make_optimizer(self.parameters)

    def clip(self):
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    def synchronize(self):
        for p in self.parameters:
            dist.all_reduce(p.grad)
            p.grad /= self.world_size

    def run(self, model, batch):
        self.optimizer.zero_grad()
        qlike(model, batch).backward()
        for stage in (self.clip, self.synchronize, self.optimizer.step):
            stage()


def step(model, shard, rank):
    Loop(model, rank.world_size).run(model, shard)
