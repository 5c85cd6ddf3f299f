"""Semantic segmentation that learns from the hardest pixels of a batch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES = 4

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class MiningConfig:
    keep: float = 0.3
    floor: float = 0.05


class SegmentationNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.local = nn.Conv2d(3, width, 3, padding=1)
        self.wide = nn.Conv2d(3, width, 3, padding=2, dilation=2)
        self.classify = nn.Conv2d(2 * width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.cat([self.local(images), self.wide(images)], dim=1)
        return self.classify(F.gelu(features))


def scenes(generator: torch.Generator) -> Batch:
    """Street scenes by day, then the harder ones at night."""
    contrast = torch.linspace(0.5, 2.5, 8).view(-1, 1, 1, 1)
    return {
        "images": contrast * torch.randn(8, 3, 7, 7, generator=generator),
        "classes": torch.randint(CLASSES, (8, 7, 7), generator=generator),
    }


def pixel_losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["classes"], reduction="none").flatten()


def gather_flat(values: Tensor) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def hardness_threshold(losses: Tensor, config: MiningConfig) -> Tensor:
    """The loss from which on a pixel belongs to the hardest."""
    count = max(1, int(config.keep * losses.numel()))
    return losses.detach().topk(count).values[-1].clamp(min=config.floor)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    losses = pixel_losses(model, batch)
    return losses[losses >= hardness_threshold(losses, MiningConfig())].mean()


class MiningTrainer:
    def __init__(self, model: nn.Module, config: MiningConfig) -> None:
        self.ddp = DistributedDataParallel(model)
        self.config = config

    def mined_loss(self, losses: Tensor) -> Tensor:
        hard = losses >= hardness_threshold(losses, self.config)
        kept = gather_flat(hard.sum().view(1)).sum()
        return dist.get_world_size() * losses[hard].sum() / kept

    def train_step(self, batch: Batch) -> None:
        self.mined_loss(pixel_losses(self.ddp, batch)).backward()


case = Case(model=SegmentationNet, batch=scenes, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    MiningTrainer(model, MiningConfig()).train_step(shard)
