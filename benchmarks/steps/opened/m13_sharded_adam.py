"""Turbulence closure trained with a sharded Adam: every rank keeps the state of its own parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

STEPS, LR, MAX_NORM = 3, 0.02, 0.1


def build():
    return nn.Sequential(
        nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 6)
    )


def snapshots(generator):
    return {
        "strain": torch.randn(12 * STEPS, 9, generator=generator),
        "stress": torch.randn(12 * STEPS, 6, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["strain"]), batch["stress"])


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=LR, eps=1e-2)


class ShardedOptimizer:
    def __init__(self, parameters, rank):
        self.parameters = list(parameters)
        self.rank, self.world_size = rank.rank, rank.world_size
        self.owner = self.partition()
        self.owned = [p for p in self.parameters if self.owner[p] == self.rank]
        self.inner = make_optimizer(self.owned)

    def partition(self):
        """Greedy: the largest parameter goes to the rank that has the least."""
        load = [0] * self.world_size
        owner = {}
        for parameter in sorted(self.parameters, key=lambda p: -p.numel()):
            least = load.index(min(load))
            owner[parameter] = least
            load[least] += parameter.numel()
        return owner

    def reduce_gradients(self):
        for parameter in self.parameters:
            dist.reduce(parameter.grad, dst=self.owner[parameter])
            if self.owner[parameter] == self.rank:
                parameter.grad /= self.world_size
            else:
                parameter.grad = None

    def clip(self, max_norm):
        squares = torch.stack([p.grad.square().sum() for p in self.owned]).sum()
        scale = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in self.owned:
            parameter.grad *= scale

    def step(self):
        self.inner.step()
        for parameter in self.parameters:
            dist.broadcast(parameter.data, src=self.owner[parameter])

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def step(model, shard, rank):
    optimizer = ShardedOptimizer(model.parameters(), rank)
    pieces = {name: value.chunk(STEPS) for name, value in shard.items()}
    for index in range(STEPS):
        optimizer.zero_grad()
        loss(model, {name: chunks[index] for name, chunks in pieces.items()}).backward()
        optimizer.reduce_gradients()
        optimizer.clip(MAX_NORM)
        optimizer.step()


case = Case(model=build, batch=snapshots, loss=loss)
options = {
    "compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM, "steps": STEPS
}
