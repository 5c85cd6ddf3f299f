"""A detector with two losses: class-weighted cross-entropy, and boxes where there is an object."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CLASS_WEIGHTS = (0.2, 1.0, 2.0)
BOX_GAIN = 0.5


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 10), nn.SiLU())
        self.classes = nn.Linear(10, len(CLASS_WEIGHTS))
        self.boxes = nn.Linear(10, 4)

    def forward(self, x):
        features = self.backbone(x)
        return self.classes(features), self.boxes(features)


def summed_losses(model, batch):
    logits, boxes = model(batch["x"])
    weights = torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype, device=logits.device)
    classification = F.cross_entropy(logits, batch["label"], weight=weights, reduction="sum")
    errors = F.smooth_l1_loss(boxes, batch["box"], reduction="none").sum(dim=1)
    return classification, (errors * (batch["label"] > 0)).sum()


def normalizers(batch):
    weights = torch.tensor(CLASS_WEIGHTS, dtype=batch["x"].dtype, device=batch["x"].device)
    return torch.stack([weights[batch["label"]].sum(), (batch["label"] > 0).sum()])


def loss(model, batch):
    classification, box = summed_losses(model, batch)
    weight, objects = normalizers(batch)
    return classification / weight + BOX_GAIN * box / objects.clamp(min=1)


def make_batch(generator):
    return {
        "x": torch.randn(16, 8, generator=generator),
        "label": torch.randint(0, 3, (16,), generator=generator).sort().values,
        "box": torch.rand(16, 4, generator=generator),
    }


case = Case(model=Detector, batch=make_batch, loss=loss, layout="2x2")


def compute_loss(ddp, batch, world_size):
    classification, box = summed_losses(ddp, batch)
    totals = normalizers(batch)
    dist.all_reduce(totals)
    classification = world_size * classification / totals[0]
    box = box / totals[1].clamp(min=1)
    return classification + BOX_GAIN * box


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    compute_loss(ddp, shard, rank.world_size).backward()
