"""Gradients are kept in one flat buffer, and every rank is the owner of one partition of it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(7, 9)
        self.fc2 = nn.Linear(9, 9)
        self.fc3 = nn.Linear(9, 6)

    def forward(self, x):
        x = torch.tanh(self.fc1(x))
        return self.fc3(torch.tanh(self.fc2(x)))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"])


def make_batch(generator):
    return {
        "x": torch.randn(16, 7, generator=generator),
        "label": torch.randint(0, 6, (16,), generator=generator),
    }


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x4")


class PartitionedGradients:
    """Stage 2: an owner reduces its partition, and hands out the result."""

    def __init__(self, params, world_size):
        self.params = list(params)
        self.world_size = world_size
        numel = sum(p.numel() for p in self.params)
        self.flat = torch.zeros(numel, dtype=self.params[0].dtype, device=self.params[0].device)
        self.partition_size = numel // world_size
        self._attach()

    def _attach(self):
        offset = 0
        for p in self.params:
            p.grad = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()

    def partition(self, owner):
        start = owner * self.partition_size
        return self.flat[start : start + self.partition_size]

    def reduce(self, rank):
        for owner in range(self.world_size):
            mine = self.partition(owner)
            dist.reduce(mine, dst=owner)
            if owner == rank:
                mine /= self.world_size

    def gather(self):
        for owner in range(self.world_size):
            dist.broadcast(self.partition(owner), src=owner)


def step(model, shard, rank):
    gradients = PartitionedGradients(model.parameters(), rank.world_size)
    loss(model, shard).backward()
    gradients.reduce(rank.rank)
    gradients.gather()
