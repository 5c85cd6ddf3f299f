"""Redundancy reduction (as in Barlow Twins) on the cross-correlation matrix of the whole batch."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

OFF_DIAGONAL = 0.05


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 5, bias=False))

    def forward(self, x):
        return self.layers(x)


def correlate(model, batch):
    return model(batch["left"]).T @ model(batch["right"])


def redundancy(correlation):
    diagonal = correlation.diagonal()
    off_diagonal = correlation - torch.diag(diagonal)
    return (diagonal - 1).square().sum() + OFF_DIAGONAL * off_diagonal.square().sum()


def loss(model, batch):
    return redundancy(correlate(model, batch) / len(batch["left"]))


def make_batch(generator):
    x = torch.randn(16, 7, generator=generator)
    return {
        "left": x + 0.2 * torch.randn(16, 7, generator=generator),
        "right": x + 0.2 * torch.randn(16, 7, generator=generator),
    }


case = Case(model=Projector, batch=make_batch, loss=loss, layout="1x4")


def total(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, as part of the graph."""

    @staticmethod
    def forward(ctx, tensor):
        return total(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad


def average_gradients(params):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def step(model, shard, rank):
    model.zero_grad()
    rows = rank.world_size * len(shard["left"])
    correlation = SumOverRanks.apply(correlate(model, shard)) / rows
    redundancy(correlation).backward()
    average_gradients(model.parameters())
