"""Segments of lidar scans with a small PointNet. Features are centred over all points in a batch.

Scans differ much from each other, so the centre has to be that of all workers' scans.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SCANS, POINTS, CLASSES = 8, 11, 4


def own_mean(features):
    return features.mean(dim=(0, 1))


class Centre(nn.Module):
    """Subtracts the mean of the batch. ``mean`` may be replaced by one over many processes."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.mean = own_mean

    def forward(self, features):
        return (features - self.mean(features)) * self.gain


class PointNet(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.point = nn.Linear(4, width)
        self.centre = Centre(width)
        self.fuse = nn.Linear(2 * width, width)
        self.segment = nn.Linear(width, CLASSES)

    def forward(self, points):
        local = torch.tanh(self.centre(self.point(points)))
        whole = local.amax(dim=1, keepdim=True).expand_as(local)
        return self.segment(torch.tanh(self.fuse(torch.cat([local, whole], dim=-1))))


def scans(generator):
    shift = torch.randn(SCANS, 1, 4, generator=generator)
    return {
        "points": shift + torch.randn(SCANS, POINTS, 4, generator=generator),
        "segments": torch.randint(CLASSES, (SCANS, POINTS), generator=generator),
    }


def loss(model, batch):
    logits = model(batch["points"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["segments"].flatten())


case = Case(model=PointNet, batch=scans, loss=loss, layout="1x2")


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return averaged(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / dist.get_world_size(ctx.group), None


def averaged(tensor, group=None):
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def synchronise(model, group=None):
    """Makes all centres of a model those of the whole group."""
    for module in model.modules():
        if isinstance(module, Centre):
            module.mean = lambda features: _Averaged.apply(own_mean(features), group)
    return model


def step(model, shard, rank):
    ddp = DistributedDataParallel(synchronise(model, dist.group.WORLD))
    loss(ddp, shard).backward()
