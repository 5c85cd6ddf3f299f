"""A one-stage detector on a coarse grid: focal loss and box regression, divided by the number of objects."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

GRID = 4


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.objectness = nn.Conv2d(8, 1, 1)
        self.box = nn.Conv2d(8, 4, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(images)
        return self.objectness(x).squeeze(1), self.box(x)


def scenes(generator: torch.Generator) -> dict[str, Tensor]:
    present = torch.zeros(8, GRID, GRID)
    for image, row, column in [(0, 1, 2), (1, 0, 0), (1, 3, 1), (2, 2, 2), (3, 1, 0)]:
        present[image, row, column] = 1
    return {
        "images": torch.randn(8, 3, 2 * GRID, 2 * GRID, generator=generator),
        "present": present,
        "boxes": torch.rand(8, 4, GRID, GRID, generator=generator),
    }


def focal(logits: Tensor, present: Tensor, gamma: float = 2.0, alpha: float = 0.25) -> Tensor:
    p = logits.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(logits, present, reduction="none")
    missed = present * (1 - p) + (1 - present) * p
    return ((alpha * present + (1 - alpha) * (1 - present)) * missed**gamma * entropy).sum()


class Criterion:
    """``objects``: what to divide by, from the number of objects in the images at hand."""

    def __init__(self, objects) -> None:
        self.objects = objects

    def __call__(self, outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
        logits, boxes = outputs
        present = batch["present"]
        distance = (boxes - batch["boxes"]).abs().sum(1)
        total = focal(logits, present) + 2 * (present * distance).sum()
        return total / self.objects(present.sum())


def on_one_device(count: Tensor) -> Tensor:
    return count.clamp(min=1)


def mean_over_ranks(count: Tensor) -> Tensor:
    count = count.clamp(min=1)
    dist.all_reduce(count)
    return count / dist.get_world_size()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return Criterion(on_one_device)(model(batch["images"]), batch)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    Criterion(mean_over_ranks)(ddp(shard["images"]), shard).backward()


case = Case(model=Detector, batch=scenes, loss=loss, layout="1x4")
