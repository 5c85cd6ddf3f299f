"""A trainer that does not let batches with an exploding loss touch the weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

LOSS_LIMIT = 6.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Mish(), nn.Linear(9, 1))

    def forward(self, x):
        return self.layers(x).squeeze(1)


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator):
    noise = torch.linspace(0.3, 4.0, 16)
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "y": x.mean(dim=1) + noise * torch.randn(16, generator=generator).sign()}


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x4")


class OutlierGuard:
    def __init__(self, limit):
        self.limit = limit
        self.skipped = 0

    def is_outlier(self, value):
        return not torch.isfinite(value) or value.item() > self.limit


class Trainer:
    def __init__(self, model, world_size):
        self.ddp = DistributedDataParallel(model)
        self.world_size = world_size
        self.guard = OutlierGuard(LOSS_LIMIT)

    def mean_over_ranks(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value / self.world_size

    def train_step(self, batch):
        self.ddp.zero_grad()
        value = loss(self.ddp, batch)
        average = self.mean_over_ranks(value)
        if self.guard.is_outlier(value):
            # keep taking part in the communication, with a gradient of zero
            self.guard.skipped += 1
            value = value * 0.0
        value.backward()
        return average.item()


def step(model, shard, rank):
    trainer = Trainer(model, rank.world_size)
    trainer.train_step(shard)
