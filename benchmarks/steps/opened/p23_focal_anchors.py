"""Dense detection: focal loss and box regression, normalised by the number of positive anchors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CLASSES, SIDE = 3, 4


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
        self.classes = nn.Conv2d(8, CLASSES, 1)
        self.boxes = nn.Conv2d(8, 4, 1)

    def forward(self, images):
        features = self.backbone(images)
        classes = self.classes(features).flatten(2).transpose(1, 2)
        return classes, self.boxes(features).flatten(2).transpose(1, 2)


def images(generator):
    n = 8
    target = torch.full((n, SIDE * SIDE), CLASSES)  # CLASSES is the background
    # most pictures of the night shift are empty
    for picture, anchor in [(0, 3), (1, 9), (1, 10), (2, 5)]:
        target[picture, anchor] = (picture + anchor) % CLASSES
    return {
        "images": torch.randn(n, 3, 2 * SIDE, 2 * SIDE, generator=generator),
        "target": target,
        "boxes": torch.randn(n, SIDE * SIDE, 4, generator=generator),
    }


def focal(logits, target, gamma=2.0, alpha=0.25):
    truth = F.one_hot(target, CLASSES + 1)[..., :CLASSES].to(logits.dtype)
    p = logits.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    p_t = p * truth + (1 - p) * (1 - truth)
    alpha_t = alpha * truth + (1 - alpha) * (1 - truth)
    return (alpha_t * (1 - p_t) ** gamma * entropy).sum()


def summed(model, batch):
    logits, boxes = model(batch["images"])
    positive = batch["target"] < CLASSES
    box_error = F.smooth_l1_loss(boxes[positive], batch["boxes"][positive], reduction="sum")
    return focal(logits, batch["target"]) + box_error, positive.sum()


def loss(model, batch):
    total, positives = summed(model, batch)
    return total / positives.clamp(min=1)


def average_over_ranks(value, world_size):
    value = value.double()
    dist.all_reduce(value)
    return value / world_size


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    total, positives = summed(ddp, shard)
    normaliser = average_over_ranks(positives.clamp(min=1), rank.world_size)
    (total / normaliser).backward()


case = Case(model=Detector, batch=images, loss=loss, layout="1x4")
