"""A trainer that protects itself against exploding gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

MAX_NORM = 2.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 12),
            nn.ReLU(),
            nn.Linear(12, 3),
        )

    def forward(self, x):
        return self.layers(x)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def make_batch(generator):
    x = torch.randn(8, 5, generator=generator)
    direction = torch.where(torch.arange(8) < 4, 3.0, -3.0)
    return x, direction[:, None] + torch.randn(8, 3, generator=generator)


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x2")


class Trainer:
    def __init__(self, model, rank, max_norm=MAX_NORM):
        self.model = model
        self.world_size = rank.world_size
        self.max_norm = max_norm
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(self):
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def all_reduce(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= self.world_size

    def backward(self, batch):
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        return value.detach()

    def train_step(self, batch):
        value = self.backward(batch)
        norm = self.clip()
        self.all_reduce()
        return {"loss": value, "norm": norm}


def step(model, shard, rank):
    trainer = Trainer(model, rank)
    trainer.train_step(shard)
