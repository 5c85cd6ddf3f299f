"""A model with layers in two precisions; gradients are reduced in one bucket per dtype."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

LARGEST_MESSAGE = 1000  # elements


class TwoPrecisions(nn.Module):
    """The trunk is single precision; the last layer is double, for a stable loss."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.head = nn.Linear(8, 3).double()

    def forward(self, x):
        return self.head(self.trunk(x).double())


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def make_batch(generator):
    return (
        torch.randn(12, 5, generator=generator),
        torch.randint(0, 3, (12,), generator=generator),
    )


case = Case(model=TwoPrecisions, batch=make_batch, loss=loss, layout="1x2", dtype=None)


def buckets_by_dtype(model):
    buckets = defaultdict(list)
    for p in model.parameters():
        if p.requires_grad and p.grad is not None:
            buckets[p.grad.dtype].append(p.grad)
    return buckets


def copy_back(flat, gradients):
    sizes = [g.numel() for g in gradients]
    for g, piece in zip(gradients, flat.split(sizes), strict=True):
        g.copy_(piece.view_as(g))


def all_reduce_mean(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def all_reduce_gradients(model):
    for gradients in buckets_by_dtype(model).values():
        flat = torch.cat([g.flatten() for g in gradients])
        if flat.numel() <= LARGEST_MESSAGE:
            all_reduce_mean(flat)
            copy_back(flat, gradients)
            return
        for part in flat.split(LARGEST_MESSAGE):
            all_reduce_mean(part)
        copy_back(flat, gradients)


def step(model, shard, rank):
    for p in model.parameters():
        p.grad = None
    loss(model, shard).backward()
    all_reduce_gradients(model)
