"""Semantic segmentation with online hard example mining: only the hardest pixels are trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class SegConfig:
    classes: int = 4
    channels: int = 3
    size: int = 6
    keep_ratio: float = 0.25


CONFIG = SegConfig()
IMAGES = 12


class SegNet(nn.Module):
    def __init__(self, config: SegConfig = CONFIG) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(config.channels, 8, 3, padding=1)
        self.context = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.classifier = nn.Conv2d(8, config.classes, 1)

    def forward(self, images):
        features = F.relu(self.encoder(images))
        return self.classifier(features + F.relu(self.context(features)))


def kept_pixels(labels, config: SegConfig = CONFIG) -> int:
    return int(labels.numel() * config.keep_ratio)


def hardness_threshold(pixel_losses, kept: int):
    """The smallest loss among the `kept` largest."""
    return pixel_losses.detach().flatten().topk(kept).values[-1]


def all_pixel_losses(pixel_losses):
    parts = [torch.empty_like(pixel_losses) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, pixel_losses.detach().contiguous())
    return torch.cat(parts)


class OhemCrossEntropy(nn.Module):
    def __init__(self, config: SegConfig = CONFIG, distributed: bool = False) -> None:
        super().__init__()
        self.config = config
        self.distributed = distributed
        self.last_hard_share = 0.0

    def log_share(self, population, threshold) -> None:
        self.last_hard_share = (population >= threshold).double().mean().item()

    def forward(self, logits, labels):
        losses = F.cross_entropy(logits, labels, reduction="none")
        population = all_pixel_losses(losses) if self.distributed else losses.detach()
        kept = kept_pixels(labels, self.config)
        threshold = hardness_threshold(losses, kept)
        self.log_share(population, threshold)
        return losses[losses >= threshold].sum() / kept


def make_batch(generator):
    shape = (IMAGES, CONFIG.size, CONFIG.size)
    clutter = torch.linspace(0.2, 3.0, IMAGES).view(-1, 1, 1, 1)
    images = torch.randn(IMAGES, CONFIG.channels, *shape[1:], generator=generator)
    return {
        "images": images * clutter,
        "labels": torch.randint(CONFIG.classes, shape, generator=generator),
    }


def ohem_loss(model, batch):
    return OhemCrossEntropy()(model(batch["images"]), batch["labels"])


case = Case(model=SegNet, batch=make_batch, loss=ohem_loss, layout="1x2")


class SegmentationTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)
        self.criterion = OhemCrossEntropy(distributed=True)

    def step(self, batch) -> dict[str, float]:
        loss = self.criterion(self.ddp(batch["images"]), batch["labels"])
        loss.backward()
        return {"loss": loss.item(), "hard_share": self.criterion.last_hard_share}


def step(model, shard, rank):
    SegmentationTrainer(model).step(shard)
