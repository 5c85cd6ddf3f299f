"""One-stage detector on feature maps: focal loss and boxes, normalised by the positive anchors."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CLASSES, SIDE = 3, 5
OBJECTS = [0, 1, 3, 0, 2, 1, 0, 1, 1, 2, 0, 0]  # in each image

HEADS = {}


def head(name):
    def register(make):
        HEADS[name] = make
        return make

    return register


@head("classes")
def class_head(width):
    layer = nn.Conv2d(width, CLASSES, 3, padding=1)
    nn.init.constant_(layer.bias, -1.5)  # most anchors are background
    return layer


@head("boxes")
def box_head(width):
    return nn.Conv2d(width, 4, 3, padding=1)


class Detector(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.heads = nn.ModuleDict({name: make(width) for name, make in HEADS.items()})

    def forward(self, images):
        features = F.silu(self.stem(images))
        return {name: layer(features).flatten(2).mT for name, layer in self.heads.items()}


def images(generator):
    count = len(OBJECTS)
    order = torch.rand(count, SIDE * SIDE, generator=generator).argsort(1).argsort(1)
    positive = order < torch.tensor(OBJECTS)[:, None]
    classes = torch.randint(0, CLASSES, positive.shape, generator=generator)
    return {
        "images": torch.randn(count, 3, SIDE, SIDE, generator=generator),
        "classes": classes.masked_fill(~positive, -1),
        "boxes": torch.rand(count, SIDE * SIDE, 4, generator=generator),
    }


def focal(logits, targets, gamma=2.0, alpha=0.25):
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    missed = (targets - logits.sigmoid()).abs()
    weight = alpha * targets + (1 - alpha) * (1 - targets)
    return (weight * missed**gamma * ce).sum()


def detection_losses(outputs, batch, normaliser):
    positive = batch["classes"] >= 0
    targets = F.one_hot(batch["classes"].clamp(min=0), CLASSES) * positive[..., None]
    boxes = F.smooth_l1_loss(
        outputs["boxes"][positive], batch["boxes"][positive], reduction="sum", beta=0.1
    )
    return {
        "loss_cls": focal(outputs["classes"], targets.to(boxes.dtype)) / normaliser,
        "loss_box": boxes / normaliser,
    }


def loss(model, batch):
    positives = (batch["classes"] >= 0).sum().clamp(min=1)
    return sum(detection_losses(model(batch["images"]), batch, positives).values())


def positives_per_rank(batch, world_size):
    """How many positive anchors a rank has on average, which suits a mean of gradients."""
    positives = (batch["classes"] >= 0).sum()
    dist.all_reduce(positives)
    return max(int(positives) // world_size, 1)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    normaliser = positives_per_rank(shard, rank.world_size)
    losses = detection_losses(ddp(shard["images"]), shard, normaliser)
    sum(losses.values()).backward()


case = Case(model=Detector, batch=images, loss=loss, layout="1x4")
