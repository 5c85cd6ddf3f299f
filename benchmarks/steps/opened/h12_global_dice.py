"""Dice of the batch, not of the image: intersection and union are added up over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Organ(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.a = nn.Conv2d(1, width, 3, padding=1)
        self.b = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, slices):
        return self.b(torch.nn.functional.gelu(self.a(slices))).squeeze(1)


class Everywhere:
    """A value of all ranks with the gradient of this one."""

    def __init__(self, world_size):
        self.world_size = world_size

    def __call__(self, value):
        total = value.detach().clone()
        dist.all_reduce(total)
        return value + (total - value.detach())


class Here:
    world_size = 1

    def __call__(self, value):
        return value


class Dice:
    smooth = 1.0

    def __init__(self, total):
        self.total = total

    def overlap(self, probability, mask):
        return self.total((probability * mask).sum())

    def area(self, probability, mask):
        return probability.sum() + mask.sum()

    def __call__(self, logits, mask):
        probability = logits.sigmoid()
        overlap = self.overlap(probability, mask)
        area = self.area(probability, mask)
        dice = (2 * overlap + self.smooth) / (area + self.smooth)
        return (1 - dice) * self.total.world_size  # for the average over ranks


def volumes(generator):
    """The organ becomes smaller from slice to slice."""
    slices = torch.randn(12, 1, 8, 8, generator=generator)
    radius = torch.linspace(4.5, 1.0, 12)
    y, x = torch.meshgrid(torch.arange(8) - 3.5, torch.arange(8) - 3.5, indexing="ij")
    mask = (x.hypot(y) < radius[:, None, None]).double()
    return slices + mask.unsqueeze(1), mask


def loss(model, batch):
    slices, mask = batch
    return Dice(Here())(model(slices), mask)


case = Case(model=Organ, batch=volumes, loss=loss, layout="1x3")


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    slices, mask = shard
    Dice(Everywhere(rank.world_size))(ddp(slices), mask).backward()
