"""Organ segmentation in CT volumes: soft Dice over all voxels of the batch, plus cross entropy."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOLUMES, SIDE, ORGANS = 6, 4, 3


class UNetish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(6, 6, 2, stride=2)
        self.out = nn.Conv3d(7, ORGANS, 1)

    def forward(self, volume: Tensor) -> Tensor:
        coarse = self.down(volume).relu()
        return self.out(torch.cat([volume, self.up(coarse).relu()], dim=1))


class DiceSums:
    """Per organ: 2 * overlap, and the two sizes that it is divided by."""

    def __init__(self, logits: Tensor, organs: Tensor) -> None:
        probability = logits.softmax(1)
        truth = F.one_hot(organs, ORGANS).movedim(-1, 1).to(probability.dtype)
        voxels = (0, 2, 3, 4)
        self.overlap = 2 * (probability * truth).sum(voxels)
        self.sizes = probability.sum(voxels) + truth.sum(voxels)

    def over_ranks(self) -> "DiceSums":
        self.overlap = dist_fn.all_reduce(self.overlap)
        sizes = self.sizes.detach().clone()
        dist.all_reduce(sizes)
        self.sizes = sizes
        return self

    def loss(self) -> Tensor:
        return 1 - ((self.overlap + 1) / (self.sizes + 1)).mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ct"])
    return DiceSums(logits, batch["organ"]).loss() + F.cross_entropy(logits, batch["organ"])


def scans(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "ct": torch.randn(VOLUMES, 1, SIDE, SIDE, SIDE, generator=generator),
        "organ": torch.randint(ORGANS, (VOLUMES, SIDE, SIDE, SIDE), generator=generator),
    }


case = Case(model=UNetish, batch=scans, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    logits = ddp(shard["ct"])
    dice = DiceSums(logits, shard["organ"]).over_ranks().loss()
    (dice + F.cross_entropy(logits, shard["organ"])).backward()
