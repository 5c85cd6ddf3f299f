"""A one-stage detector: focal loss at every location, L1 of the boxes at the positive ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

IMAGES, SIZE, CLASSES = 12, 6, 3

Batch = dict[str, Tensor]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU())
        self.classes = nn.Conv2d(8, CLASSES, 3, padding=1)
        self.boxes = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(images)
        return self.classes(features), self.boxes(features)


def annotated_images(generator: torch.Generator) -> Batch:
    """Photographs with objects, followed by the negatives, which have none."""
    labels = torch.randint(CLASSES, (IMAGES, SIZE, SIZE), generator=generator)
    occupied = torch.rand(IMAGES, SIZE, SIZE, generator=generator) < 0.08
    occupied[0, 2, 3] = True
    occupied[8:] = False
    return {
        "images": torch.randn(IMAGES, 2, SIZE, SIZE, generator=generator),
        "labels": labels.masked_fill(~occupied, -1),
        "boxes": torch.rand(IMAGES, 4, SIZE, SIZE, generator=generator),
    }


def sigmoid_focal_loss(logits: Tensor, targets: Tensor, alpha: float = 0.25) -> Tensor:
    probability = logits.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    missing = probability * (1 - targets) + (1 - probability) * targets
    balance = alpha * targets + (1 - alpha) * (1 - targets)
    return (balance * missing.square() * entropy).sum()


class Criterion:
    """Sums over all locations, divided by a number of objects."""

    def __init__(self, box_weight: float = 2.0) -> None:
        self.box_weight = box_weight

    def __call__(self, outputs: tuple[Tensor, Tensor], batch: Batch, objects: Tensor) -> Tensor:
        logits, boxes = outputs
        positive = batch["labels"] >= 0
        hot = F.one_hot(batch["labels"].clamp(min=0), CLASSES) * positive.unsqueeze(-1)
        loss_class = sigmoid_focal_loss(logits, hot.movedim(-1, 1).to(logits.dtype))
        distance = (boxes - batch["boxes"]).abs().sum(dim=1)
        loss_box = distance[positive].sum()
        return (loss_class + self.box_weight * loss_box) / objects


def count_objects(batch: Batch) -> Tensor:
    return (batch["labels"] >= 0).sum().to(batch["images"].dtype)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return Criterion()(model(batch["images"]), batch, count_objects(batch).clamp(min=1))


class DetectionTrainer:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.world_size = world_size
        self.criterion = Criterion()

    def objects_per_rank(self, batch: Batch) -> Tensor:
        objects = count_objects(batch).clamp(min=1)
        dist.all_reduce(objects)
        return objects / self.world_size

    def train_step(self, batch: Batch) -> None:
        outputs = self.ddp(batch["images"])
        self.criterion(outputs, batch, self.objects_per_rank(batch)).backward()


case = Case(model=Detector, batch=annotated_images, loss=loss, layout="1x3")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    DetectionTrainer(model, rank.world_size).train_step(shard)
