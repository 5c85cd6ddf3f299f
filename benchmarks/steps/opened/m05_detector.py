"""Anchor-based detector head: focal loss and box loss, both normalised by the positive anchors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ANCHORS, CLASSES = 9, 4


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 20), nn.ReLU())
        self.classes = nn.Linear(20, ANCHORS * CLASSES)
        self.boxes = nn.Linear(20, ANCHORS * 4)

    def forward(self, features):
        hidden = self.trunk(features)
        return (
            self.classes(hidden).unflatten(-1, (ANCHORS, CLASSES)),
            self.boxes(hidden).unflatten(-1, (ANCHORS, 4)),
        )


def images(generator):
    return {
        "features": torch.randn(12, 12, generator=generator),
        # -1 is background
        "label": torch.randint(-6, CLASSES, (12, ANCHORS), generator=generator).clamp(min=-1),
        "box": torch.randn(12, ANCHORS, 4, generator=generator),
    }


def focal(logits, targets, gamma=2.0, alpha=0.25):
    probability = logits.sigmoid()
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    correct = probability * targets + (1 - probability) * (1 - targets)
    weight = alpha * targets + (1 - alpha) * (1 - targets)
    return (weight * (1 - correct) ** gamma * cross_entropy).sum()


def summed_losses(outputs, batch):
    logits, boxes = outputs
    positive = batch["label"] >= 0
    targets = F.one_hot(batch["label"].clamp(min=0), CLASSES) * positive.unsqueeze(-1)
    classification = focal(logits, targets.to(logits.dtype))
    regression = F.smooth_l1_loss(boxes[positive], batch["box"][positive], reduction="sum")
    return {"classification": classification, "regression": regression}


def positives(batch):
    return (batch["label"] >= 0).sum().double()


def loss(model, batch):
    losses = summed_losses(model(batch["features"]), batch)
    return sum(losses.values()) / positives(batch).clamp(min=1)


class LossNormalizer:
    """The number of positive anchors that one rank's summed losses are divided by."""

    def __init__(self, world_size):
        self.world_size = world_size

    def __call__(self, batch):
        count = positives(batch)
        dist.all_reduce(count)
        return count.clamp(min=1)


def step(model, shard, rank):
    normalizer = LossNormalizer(rank.world_size)
    ddp = DistributedDataParallel(model)
    losses = summed_losses(ddp(shard["features"]), shard)
    count = normalizer(shard)
    losses = {name: value / count for name, value in losses.items()}
    sum(losses.values()).backward()


case = Case(model=Head, batch=images, loss=loss)
