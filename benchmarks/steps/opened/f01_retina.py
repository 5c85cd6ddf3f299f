"""Dense single-stage detector: focal classification and smooth-L1 regression over anchors."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class DetectorConfig:
    anchors: int = 6
    classes: int = 3
    features: int = 10
    alpha: float = 0.25
    gamma: float = 2.0
    box_weight: float = 0.5


CFG = DetectorConfig()


class DenseHead(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.cfg = cfg
        self.neck = nn.Sequential(nn.Linear(cfg.features, 16), nn.SiLU())
        self.logits = nn.Linear(16, cfg.anchors * cfg.classes)
        self.boxes = nn.Linear(16, cfg.anchors * 4)

    def forward(self, images):
        hidden = self.neck(images)
        logits = self.logits(hidden).view(-1, self.cfg.anchors, self.cfg.classes)
        return logits, self.boxes(hidden).view(-1, self.cfg.anchors, 4)


def focal_loss(logits, targets, alpha, gamma):
    prob = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = prob * targets + (1 - prob) * (1 - targets)
    alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
    return (alpha_t * ce * (1 - p_t) ** gamma).sum()


class DetectionCriterion:
    """Sums over anchors, normalized by the number of matched anchors."""

    def __init__(self, cfg=CFG):
        self.cfg = cfg

    def num_foreground(self, labels):
        count = (labels >= 0).sum().to(torch.float64)
        count = count.clamp(min=1)
        if dist.is_initialized():
            dist.all_reduce(count)
            count = count / dist.get_world_size()
        return count

    def __call__(self, outputs, batch):
        logits, boxes = outputs
        labels = batch["labels"]
        foreground = labels >= 0
        onehot = F.one_hot(labels.clamp(min=0), self.cfg.classes) * foreground.unsqueeze(-1)
        cls = focal_loss(logits, onehot.to(logits.dtype), self.cfg.alpha, self.cfg.gamma)
        reg = F.smooth_l1_loss(boxes[foreground], batch["boxes"][foreground], reduction="sum")
        return (cls + self.cfg.box_weight * reg) / self.num_foreground(labels)


def make_batch(generator):
    images = torch.randn(12, CFG.features, generator=generator)
    boxes = torch.randn(12, CFG.anchors, 4, generator=generator)
    labels = torch.full((12, CFG.anchors), -1)
    for image, matched in enumerate([2, 1, 3, 0, 2, 1, 1, 0, 0, 0, 0, 0]):
        labels[image, :matched] = torch.randint(CFG.classes, (matched,), generator=generator)
    return {"images": images, "boxes": boxes, "labels": labels}


criterion = DetectionCriterion()


def detection_loss(model, batch):
    return criterion(model(batch["images"]), batch)


class Trainer:
    def __init__(self, model):
        self.model = DistributedDataParallel(model)

    def training_step(self, batch):
        loss = detection_loss(self.model, batch)
        loss.backward()
        return loss.detach()


case = Case(model=DenseHead, batch=make_batch, loss=detection_loss, layout="1x3")


def step(model, shard, rank):
    Trainer(model).training_step(shard)
