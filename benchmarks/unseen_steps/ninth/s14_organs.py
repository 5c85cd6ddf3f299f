"""Organ segmentation with a batch-wide soft Dice, whose sums run over the slices of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

ORGANS = 3
SMOOTH = 1.0


class AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(5, ORGANS, 1)

    def forward(self, x):
        deep = self.up(F.relu(self.down(x)))
        return self.last(torch.cat([x, deep], 1)).sigmoid()


def slices(generator):
    size = torch.linspace(0.2, 0.8, 12)[:, None, None, None]
    masks = torch.rand(12, ORGANS, 8, 8, generator=generator) < size
    x = torch.randn(12, 1, 8, 8, generator=generator) + masks.sum(1, keepdim=True)
    return {"x": x, "masks": masks.float()}


class SoftDice:
    """Terms are summed over the images and pixels, and then by `reduce` over the ranks."""

    def __init__(self, reduce=lambda sums: sums):
        self.reduce = reduce

    def overlap(self, predicted, masks):
        return self.reduce((predicted * masks).sum((0, 2, 3)))

    def volumes(self, predicted, masks):
        return self.reduce(predicted.sum((0, 2, 3)) + masks.sum((0, 2, 3)))

    def __call__(self, predicted, masks):
        overlap, volumes = self.overlap(predicted, masks), self.volumes(predicted, masks)
        return (1 - (2 * overlap + SMOOTH) / (volumes + SMOOTH)).mean()


class SoftDiceOfRanks(SoftDice):
    def __init__(self):
        super().__init__(AllSum.apply)

    @torch.no_grad()
    def volumes(self, predicted, masks):
        return super().volumes(predicted, masks)


def objective(predicted, masks, dice):
    return F.binary_cross_entropy(predicted, masks) + 3.0 * dice(predicted, masks)


def loss(model, batch):
    return objective(model(batch["x"]), batch["masks"], SoftDice())


def step(model, shard, rank):
    ddp = DDP(model)
    # The Dice is the same number on all ranks. AllSum adds up what they say about each part,
    # which is world_size times as much, and DDP divides by that.
    objective(ddp(shard["x"]), shard["masks"], SoftDiceOfRanks()).backward()


case = Case(model=UNet, batch=slices, loss=loss)
