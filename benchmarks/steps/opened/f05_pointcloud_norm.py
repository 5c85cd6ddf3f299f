"""Part segmentation of point clouds with a batch norm that sees the points of all ranks.

(nn.SyncBatchNorm wants CUDA, and our CI has none.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn  # noqa: F401
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CLOUDS, POINTS, PARTS = 8, 7, 5


class PointNorm(nn.Module):
    """Normalises every channel over clouds and points. ``across`` includes the other ranks'."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps
        self.across = False

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, 1)
        sums = torch.stack([rows.sum(0), rows.square().sum(0)])
        count = rows.shape[0]
        if self.across:
            dist.all_reduce(sums)
            count *= dist.get_world_size()
        mean, square = sums / count
        return mean, square - mean.square()

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.moments(x)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class PartNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Linear(3, 12)
        self.norm = PointNorm(12)
        self.head = nn.Linear(24, PARTS)

    def forward(self, points: Tensor) -> Tensor:
        h = self.norm(self.local(points)).relu()
        whole = h.amax(dim=1, keepdim=True).expand_as(h)
        return self.head(torch.cat([h, whole], dim=-1))


def convert(module: nn.Module) -> nn.Module:
    for child in module.modules():
        if isinstance(child, PointNorm):
            child.across = True
    return module


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    points, parts = batch
    return nn.functional.cross_entropy(model(points).flatten(0, 1), parts.flatten())


def clouds(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    scale = torch.linspace(0.5, 2.0, CLOUDS)[:, None, None]
    points = torch.randn(CLOUDS, POINTS, 3, generator=generator) * scale
    return points, torch.randint(PARTS, (CLOUDS, POINTS), generator=generator)


case = Case(model=PartNet, batch=clouds, loss=loss, layout="1x4")


def step(model: nn.Module, shard: tuple[Tensor, Tensor], rank) -> None:
    ddp = DistributedDataParallel(convert(model), broadcast_buffers=False)
    loss(ddp, shard).backward()
