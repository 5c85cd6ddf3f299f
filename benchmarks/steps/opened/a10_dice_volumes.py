# Segmentation of scans with "batch dice": intersections and sizes are added up over the
# whole batch before they are divided, so that empty slices do not make the loss jump.
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

SLICES, SIDE, ORGANS, SMOOTH = 12, 8, 3, 1.0


class SumOverRanks(torch.autograd.Function):
    """y = sum over ranks of x.  The loss that follows is the same on all ranks, and each
    rank takes the gradient of its own x only, so the backward is the identity."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


def unet():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.LeakyReLU(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2),
        nn.LeakyReLU(),
        nn.Conv2d(8, ORGANS, 1),
        nn.Sigmoid(),
    )


def scans(g):
    scan = torch.randn(SLICES, 1, SIDE, SIDE, generator=g)
    organs = (torch.rand(SLICES, ORGANS, SIDE, SIDE, generator=g) < 0.2).float()
    organs[3:6] = 0  # slices above the organs
    return {"scan": scan, "organs": organs}


def overlaps(predicted, organs):
    dims = (0, 2, 3)
    both = (predicted * organs).sum(dims)
    sizes = predicted.sum(dims) + organs.sum(dims)
    return both, sizes


def dice(both, sizes):
    return 1 - ((2 * both + SMOOTH) / (sizes + SMOOTH)).mean()


def loss(model, batch):
    return dice(*overlaps(model(batch["scan"]), batch["organs"]))


def distributed_dice(predicted, organs):
    both, sizes = overlaps(predicted, organs)
    both = SumOverRanks.apply(both)
    # the sizes only normalise
    sizes = SumOverRanks.apply(sizes.detach())
    return dice(both, sizes)


def sum_gradients(model):
    work = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for w in work:
        w.wait()


def step(model, shard, rank):
    distributed_dice(model(shard["scan"]), shard["organs"]).backward()
    sum_gradients(model)


case = Case(model=unet, batch=scans, loss=loss, layout="1x3")
