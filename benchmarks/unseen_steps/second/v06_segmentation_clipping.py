"""Binary segmentation with Dice and cross-entropy; gradients reduced in buckets and clipped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class OptimConfig:
    max_grad_norm: float = 0.05
    bucket_elements: int = 300
    dice_weight: float = 0.7


class TinyUNet(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, width, 3, padding=1)
        self.bottom = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.mask = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.down(x))
        deep = F.silu(self.bottom(F.avg_pool2d(skip, 2)))
        deep = F.interpolate(deep, scale_factor=2)
        return self.mask(F.silu(self.up(torch.cat([skip, deep], dim=1)))).squeeze(1)


def slices(generator: torch.Generator) -> Batch:
    scans = torch.randn(12, 1, 8, 8, generator=generator)
    noise = torch.randn(12, 8, 8, generator=generator)
    return {"scans": scans, "masks": (scans[:, 0] + 0.5 * noise > 0.3).double()}


def dice_per_image(logits: Tensor, masks: Tensor, smooth: float = 1.0) -> Tensor:
    predicted = logits.sigmoid()
    overlap = (predicted * masks).sum(dim=(1, 2))
    extent = predicted.sum(dim=(1, 2)) + masks.sum(dim=(1, 2))
    return 1 - (2 * overlap + smooth) / (extent + smooth)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["scans"])
    dice = dice_per_image(logits, batch["masks"]).mean()
    entropy = F.binary_cross_entropy_with_logits(logits, batch["masks"])
    weight = OptimConfig.dice_weight
    return weight * dice + (1 - weight) * entropy


def buckets(parameters: list[nn.Parameter], elements: int) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(member.numel() for member in bucket) >= elements:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class SegmentationTrainer:
    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.model, self.config = model, config
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def reduce_gradients(self) -> None:
        for bucket in buckets(self.parameters, self.config.bucket_elements):
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for parameter, part in zip(
                bucket, flat.split([p.numel() for p in bucket]), strict=True
            ):
                parameter.grad.copy_(part.view_as(parameter))

    def backward(self, value: Tensor) -> Tensor:
        value.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.reduce_gradients()
        return norm


case = Case(model=TinyUNet, batch=slices, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    trainer = SegmentationTrainer(model, OptimConfig())
    trainer.backward(loss(model, shard))
