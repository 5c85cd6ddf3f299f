"""Microscopy of cells without labels: two views of a cell, and the cross-correlation of their features made diagonal."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CELLS, PIXELS, FEATURES = 16, 10, 6
OFF_DIAGONAL = 0.1


def build_model():
    return nn.Sequential(
        nn.Linear(PIXELS, 16), nn.LeakyReLU(0.1), nn.Linear(16, FEATURES, bias=False)
    )


def make_batch(generator):
    cells = torch.randn(CELLS, PIXELS, generator=generator)
    return {
        "left": cells + 0.3 * torch.randn(CELLS, PIXELS, generator=generator),
        "right": cells + 0.3 * torch.randn(CELLS, PIXELS, generator=generator),
    }


def redundancy(correlation):
    diagonal = (1 - correlation.diagonal()).square().sum()
    rest = correlation.square().sum() - correlation.diagonal().square().sum()
    return diagonal + OFF_DIAGONAL * rest


def loss(model, batch):
    left, right = model(batch["left"]), model(batch["right"])
    left, right = left - left.mean(0), right - right.mean(0)
    left = left / left.square().mean(0).sqrt()
    right = right / right.square().mean(0).sqrt()
    return redundancy(left.T @ right / len(left))


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine):
        everyone = mine.clone()
        dist.all_reduce(everyone)
        return everyone

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


total = SumOverRanks.apply


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    both = ddp(torch.cat([shard["left"], shard["right"]]))
    left, right = both.chunk(2)
    cells = len(left) * rank.world_size

    # zero mean
    left = left - total(left.sum(0)) / cells
    right = right - right.mean(0)
    # unit variance
    left = left / (total(left.square().sum(0)) / cells).sqrt()
    right = right / (total(right.square().sum(0)) / cells).sqrt()

    redundancy(total(left.T @ right) / cells).backward()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
