"""A small set-prediction detector: a fixed number of queries per image, boxes assigned in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class DetectorConfig:
    features: int = 10
    hidden: int = 16
    queries: int = 4
    box_weight: float = 5.0
    no_object_weight: float = 0.1


CONFIG = DetectorConfig()
BOXES_PER_IMAGE = [4, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0, 0]


class Detector(nn.Module):
    def __init__(self, config: DetectorConfig = CONFIG) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(config.features, config.hidden), nn.GELU())
        self.query = nn.Parameter(torch.randn(config.queries, config.hidden) * 0.3)
        self.decoder = nn.Linear(config.hidden, config.hidden)
        self.objectness = nn.Linear(config.hidden, 1)
        self.box = nn.Linear(config.hidden, 4)

    def forward(self, images):
        memory = self.backbone(images).unsqueeze(1)
        decoded = torch.tanh(self.decoder(memory + self.query))
        return {
            "logits": self.objectness(decoded).squeeze(-1),
            "boxes": self.box(decoded).sigmoid(),
        }


class SetCriterion:
    """Classification and box losses, both normalised by the number of boxes."""

    def __init__(self, config: DetectorConfig = CONFIG) -> None:
        self.config = config

    def matched(self, targets):
        slots = torch.arange(self.config.queries)
        return slots < targets["count"].unsqueeze(1)

    def __call__(self, outputs, targets, num_boxes):
        matched = self.matched(targets)
        weights = torch.where(matched, 1.0, self.config.no_object_weight).to(outputs["logits"])
        loss_ce = F.binary_cross_entropy_with_logits(
            outputs["logits"], matched.to(weights), weight=weights, reduction="sum"
        )
        l1 = F.l1_loss(outputs["boxes"], targets["boxes"], reduction="none").sum(-1)
        loss_bbox = (l1 * matched).sum()
        return (loss_ce + self.config.box_weight * loss_bbox) / num_boxes


def average_box_count(targets) -> torch.Tensor:
    """The number of boxes per rank, averaged over all ranks, as the criterion expects it."""
    num_boxes = max(int(targets["count"].sum()), 1)
    num_boxes = torch.as_tensor([num_boxes], dtype=torch.float64)
    dist.all_reduce(num_boxes)
    return num_boxes / dist.get_world_size()


class DetectionTrainer:
    def __init__(self, model: nn.Module, criterion: SetCriterion) -> None:
        self.ddp = DistributedDataParallel(model)
        self.criterion = criterion

    def train_step(self, batch) -> None:
        outputs = self.ddp(batch["images"])
        loss = self.criterion(outputs, batch, average_box_count(batch))
        loss.backward()


def make_batch(generator):
    images = len(BOXES_PER_IMAGE)
    return {
        "images": torch.randn(images, CONFIG.features, generator=generator),
        "boxes": torch.rand(images, CONFIG.queries, 4, generator=generator),
        "count": torch.tensor(BOXES_PER_IMAGE),
    }


def detection_loss(model, batch):
    return SetCriterion()(model(batch["images"]), batch, batch["count"].sum().clamp(min=1))


case = Case(model=Detector, batch=make_batch, loss=detection_loss, layout="2x2")


def step(model, shard, rank):
    DetectionTrainer(model, SetCriterion()).train_step(shard)
