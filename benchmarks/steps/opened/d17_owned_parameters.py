"""Yield of a chemical reactor. Each tensor has one owner, who keeps the optimizer's state for it.

The owner receives the sum of the gradients, takes the mean, and hands it back for logging.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


def build_model():
    return nn.Sequential(
        nn.Linear(7, 20),
        nn.LeakyReLU(0.1),
        nn.Linear(20, 6),
        nn.LeakyReLU(0.1),
        nn.Linear(6, 2),
    )


def runs(generator):
    """Conditions of reactor runs, and the logits of their yield and purity."""
    return [
        torch.randn(15, 7, generator=generator),
        torch.randn(15, 2, generator=generator),
        torch.rand(15, 2, generator=generator) + 0.5,
    ]


def loss(model, batch):
    conditions, measured, weight = batch
    return (weight * (model(conditions) - measured).abs().pow(1.5)).mean()


case = Case(model=build_model, batch=runs, loss=loss, layout="1x3")


class Ownership:
    """Greedy: the largest tensor goes to whoever has least so far."""

    def __init__(self, parameters, ranks):
        self.parameters = list(parameters)
        self.ranks = ranks
        self.owner = [0] * len(self.parameters)
        load = [0] * ranks
        order = sorted(range(len(self.parameters)), key=lambda i: -self.parameters[i].numel())
        for index in order:
            lightest = load.index(min(load))
            self.owner[index] = lightest
            load[lightest] += self.parameters[index].numel()

    def owned_by(self, rank):
        return [index for index, owner in enumerate(self.owner) if owner == rank]


class ShardedGradients:
    def __init__(self, model, rank):
        self.rank = rank
        self.ownership = Ownership(model.parameters(), rank.world_size)

    def collect(self):
        for index, parameter in enumerate(self.ownership.parameters):
            dist.reduce(parameter.grad, dst=self.ownership.owner[index])

    def average(self):
        for index in self.ownership.owned_by(self.rank.rank):
            self.ownership.parameters[index].grad.div_(self.rank.world_size)

    def hand_back(self):
        for index, parameter in enumerate(self.ownership.parameters):
            dist.broadcast(parameter.grad, src=index % self.rank.world_size)


def step(model, shard, rank):
    gradients = ShardedGradients(model, rank)
    loss(model, shard).backward()
    gradients.collect()
    gradients.average()
    gradients.hand_back()
