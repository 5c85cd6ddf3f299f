"""A one-stage detector: focal loss for classes, smooth L1 for boxes, normalised by foreground."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES, GRID, IMAGES = 4, 6, 12


@dataclass(frozen=True)
class HeadConfig:
    alpha: float = 0.25
    gamma: float = 2.0
    box_weight: float = 1.5
    beta: float = 0.1


class DenseDetector(nn.Module):
    """A stem and two towers, which predict at every cell of the grid."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.cls_tower = nn.Conv2d(width, CLASSES, 3, padding=1)
        self.box_tower = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = F.silu(self.stem(images))
        logits = self.cls_tower(features).flatten(2).transpose(1, 2)
        boxes = self.box_tower(features).flatten(2).transpose(1, 2)
        return logits, boxes


def sigmoid_focal_loss(logits: Tensor, targets: Tensor, config: HeadConfig) -> Tensor:
    probability = torch.sigmoid(logits)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = probability * targets + (1 - probability) * (1 - targets)
    alpha_t = config.alpha * targets + (1 - config.alpha) * (1 - targets)
    return (alpha_t * cross_entropy * (1 - p_t) ** config.gamma).sum()


def detection_sums(model: nn.Module, batch: dict[str, Tensor], config: HeadConfig) -> Tensor:
    """Both losses, summed over all cells; background has the label -1."""
    logits, boxes = model(batch["images"])
    labels = batch["labels"]
    foreground = labels >= 0
    one_hot = F.one_hot(labels.clamp(min=0), CLASSES).to(logits.dtype) * foreground.unsqueeze(-1)
    classes = sigmoid_focal_loss(logits, one_hot, config)
    regression = F.smooth_l1_loss(
        boxes[foreground], batch["boxes"][foreground], reduction="sum", beta=config.beta
    )
    return classes + config.box_weight * regression


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    foreground = (batch["labels"] >= 0).sum().clamp(min=1)
    return detection_sums(model, batch, HeadConfig()) / foreground


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Street scenes, followed by empty ones from the background set."""
    cells = GRID * GRID
    labels = torch.full((IMAGES, cells), -1)
    for image, objects in enumerate((2, 1, 3, 1, 1, 2, 1, 1)):
        where = torch.randperm(cells, generator=generator)[:objects]
        labels[image, where] = torch.randint(CLASSES, (objects,), generator=generator)
    return {
        "images": torch.randn(IMAGES, 3, 2 * GRID, 2 * GRID, generator=generator),
        "labels": labels,
        "boxes": torch.randn(IMAGES, cells, 4, generator=generator),
    }


case = Case(model=DenseDetector, batch=make_batch, loss=loss, layout="1x3")


class DetectorTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.config = HeadConfig()
        self.world_size = rank.world_size
        self.model = DistributedDataParallel(model)

    def normaliser(self, labels: Tensor) -> Tensor:
        """Foreground cells per rank, on average over all ranks."""
        num_foreground = (labels >= 0).sum().double().clamp(min=1)
        dist.all_reduce(num_foreground)
        return num_foreground / self.world_size

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        total = detection_sums(self.model, batch, self.config)
        loss = total / self.normaliser(batch["labels"])
        loss.backward()
        return loss.detach()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    DetectorTrainer(model, rank).train_step(shard)
