"""Organs in scans: a Dice loss over the whole batch, whose sums are taken over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SCANS, SIZE, ORGANS = 8, 6, 3


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.LeakyReLU(0.1),
        nn.Conv2d(6, ORGANS, 1),
        nn.Sigmoid(),
    )


def scans(generator: torch.Generator) -> dict[str, Tensor]:
    share = torch.linspace(0.1, 0.9, SCANS)[:, None, None, None]  # from small patients to large
    organs = torch.rand(SCANS, ORGANS, SIZE, SIZE, generator=generator) < share
    return {
        "scan": torch.randn(SCANS, 1, SIZE, SIZE, generator=generator),
        "organs": organs.double(),
    }


def sums(predicted: Tensor, organs: Tensor) -> Tensor:
    """Per organ: the overlap, and the two areas together."""
    dims = (0, 2, 3)
    return torch.stack([(predicted * organs).sum(dims), (predicted + organs).sum(dims)])


def dice(overlap: Tensor, areas: Tensor) -> Tensor:
    return 1 - ((2 * overlap + 1) / (areas + 1)).mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return dice(*sums(model(batch["scan"]), batch["organs"]))


class SumOverRanks(torch.autograd.Function):
    """The sum over all ranks, which every rank then puts into the same loss."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    ddp = DistributedDataParallel(model)
    own = sums(ddp(shard["scan"]), shard["organs"])
    everyones = SumOverRanks.apply(own)
    dice(*everyones).backward()


case = Case(model=build_model, batch=scans, loss=loss, layout="1x2")
