"""Odd sizes, a parameter with fewer rows than there are ranks, and columns that are sharded."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from ddp_equivalence import Case


class Scale(nn.Module):
    """Two numbers, fewer than there are ranks."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.0, 0.5]))

    def forward(self, x):
        return x * self.gain


class OddShapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.bilinear = nn.Bilinear(7, 7, 5)
        self.last = nn.Linear(5, 2, bias=False)
        self.scale = Scale()

    def forward(self, x):
        hidden = F.softplus(self.first(x))
        return self.scale(self.last(self.bilinear(hidden, hidden)))


def loss(model, batch):
    x, y = batch
    # Not a mean over examples: FSDP's average is undone in the step.
    return F.l1_loss(model(x), y, reduction="sum")


def examples(generator):
    x = torch.randn(12, 8, generator=generator)
    return x, torch.stack([x.sum(dim=1), x.prod(dim=1)], dim=1)


def columns_if_even(world_size):
    def place(parameter):
        if parameter.ndim == 2 and parameter.shape[1] % world_size == 0:
            return Shard(1)
        return None

    return place


def step(model, shard, rank):
    place = columns_if_even(rank.world_size)
    for module in (model.first, model.bilinear, model.last):
        fully_shard(module, shard_placement_fn=place, reshard_after_forward=False)
    # Resharded to pairs of ranks instead of to all four.
    fully_shard(model.scale, reshard_after_forward=2)
    fully_shard(model)
    value = loss(model, shard)
    value.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements, name
        parameter.grad.mul_(rank.world_size)


case = Case(model=OddShapes, batch=examples, loss=loss, layout="1x4")
