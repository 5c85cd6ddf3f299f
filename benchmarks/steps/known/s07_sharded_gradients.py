"""Each rank owns one shard of the flat gradient, as in ZeRO; the shards are gathered at the end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


def build_model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loss(model, batch):
    rows, targets = batch
    return F.mse_loss(model(rows), targets)


def make_batch(generator):
    return (
        torch.randn(20, 6, generator=generator),
        torch.randn(20, 3, generator=generator),
    )


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


class ShardedGradients:
    def __init__(self, params, world_size):
        self.params = list(params)
        self.world_size = world_size
        self.numel = sum(p.numel() for p in self.params)
        self.shard_size = self.numel // world_size
        # room for the padding of the last shard
        self.buffer = self.params[0].new_zeros(self.numel + world_size)
        self.shard = self.params[0].new_zeros(self.shard_size)

    @property
    def body(self):
        return self.buffer[: self.shard_size * self.world_size]

    def collect(self):
        offset = 0
        for p in self.params:
            self.buffer[offset : offset + p.numel()] = p.grad.flatten()
            offset += p.numel()

    def reduce_scatter(self):
        dist.reduce_scatter_tensor(self.shard, self.body)
        self.shard.div_(self.world_size)

    def all_gather(self):
        dist.all_gather_into_tensor(self.body, self.shard)

    def write_back(self):
        sizes = [p.numel() for p in self.params]
        for p, piece in zip(self.params, self.buffer[: self.numel].split(sizes), strict=True):
            p.grad.copy_(piece.view_as(p))


def step(model, shard, rank):
    sharded = ShardedGradients(model.parameters(), rank.world_size)
    loss(model, shard).backward()
    sharded.collect()
    sharded.reduce_scatter()
    sharded.all_gather()
    sharded.write_back()
