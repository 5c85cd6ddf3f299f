"""Rank 0 has five crops, rank 1 three. The crops go through one by one, and join() bridges the gap."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CROPS = 8


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 1, 4, stride=2, padding=1)

    def forward(self, x):
        return self.up(F.silu(self.down(x)))


def scale_invariant(prediction, truth):
    """Per crop: the mean square of the difference less half of its squared mean."""
    difference = (prediction - truth).flatten(1)
    return difference.square().mean(1) - 0.5 * difference.mean(1).square()


class Ledger:
    """Adds the gradients of several backward passes, each of which starts from nothing."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.sums = [torch.zeros_like(p) for p in self.parameters]

    def collect(self):
        for total, parameter in zip(self.sums, self.parameters):
            total += parameter.grad
            parameter.grad = None

    def publish(self, source):
        """The rank with most crops has seen all of the rounds."""
        for total, parameter in zip(self.sums, self.parameters):
            dist.broadcast(total, src=source)
            parameter.grad = total


def crops(generator):
    image = torch.randn(CROPS, 1, 8, 8, generator=generator)
    return image, image.cumsum(-1) / 4 + torch.rand(CROPS, 1, 1, 1, generator=generator)


def loss(model, batch):
    return scale_invariant(model(batch[0]), batch[1]).mean()


case = Case(model=Depth, batch=crops, loss=loss, layout="1x2", shards="5+3")


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    ledger = Ledger(model)
    weight = rank.world_size / CROPS  # the average over ranks becomes one over crops
    with ddp.join(divide_by_initial_world_size=False):
        for image, truth in zip(*(part.split(1) for part in shard)):
            (weight * scale_invariant(ddp(image), truth).sum()).backward()
            ledger.collect()
    ledger.publish(source=0)
