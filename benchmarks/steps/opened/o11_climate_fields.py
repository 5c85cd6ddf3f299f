"""Downscaling of temperature fields; channels are normalised with the statistics of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CHANNELS, GRID, FIELDS = 5, 4, 8


class AcrossRanks(torch.autograd.Function):
    """(x - mean) / std per channel, over the examples and grid points of all ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, epsilon: float) -> Tensor:
        count = x.numel() // x.shape[1]
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        total = torch.full_like(sums[:1], count)
        sums = torch.cat([sums, total])
        dist.all_reduce(sums)
        mean, square = sums[0] / sums[2], sums[1] / sums[2]
        inverse = (square - mean.square() + epsilon).rsqrt()
        normal = (x - mean[:, None, None]) * inverse[:, None, None]
        ctx.save_for_backward(normal, inverse)
        return normal

    @staticmethod
    def backward(ctx, gradient: Tensor):
        normal, inverse = ctx.saved_tensors
        along = torch.stack([gradient.mean((0, 2, 3)), (gradient * normal).mean((0, 2, 3))])
        constant, slope = along[:, :, None, None]
        return inverse[:, None, None] * (gradient - constant - normal * slope), None


class Normalise(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))
        self.over_ranks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.over_ranks:
            normal = AcrossRanks.apply(x, 1e-5)
        else:
            normal = F.batch_norm(x, None, None, training=True, eps=1e-5)
        return self.gain * normal + self.shift


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, CHANNELS, 3, padding=1),
        Normalise(CHANNELS),
        nn.Softplus(),
        nn.Conv2d(CHANNELS, 4, 1),
        nn.PixelShuffle(2),
    )


def fields(generator: torch.Generator) -> dict[str, Tensor]:
    coarse = torch.randn(FIELDS, 2, GRID, GRID, generator=generator)
    season = torch.linspace(-2, 2, FIELDS)[:, None, None, None]
    fine = torch.randn(FIELDS, 1, 2 * GRID, 2 * GRID, generator=generator)
    return {"coarse": coarse + season, "fine": fine - 2 * season}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch["coarse"]), batch["fine"])


def convert(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Normalise):
            module.over_ranks = True
    return model


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    ddp = DistributedDataParallel(convert(model))
    loss(ddp, shard).backward()


case = Case(model=build_model, batch=fields, loss=loss, layout="1x2")
