"""A dense detection head: both losses are divided by the number of positive locations."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

CLASSES = 3


class DenseHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.cls_head = nn.Linear(8, CLASSES)
        self.reg_head = nn.Linear(8, 4)

    def forward(self, feats):
        hidden = F.relu(self.stem(feats))
        return self.cls_head(hidden), self.reg_head(hidden)


def head_losses(cls_scores, bbox_preds, labels, boxes, avg_factor):
    """``labels``: the class of a location, or CLASSES for background."""
    cls_scores, bbox_preds = cls_scores.flatten(0, 1), bbox_preds.flatten(0, 1)
    labels, boxes = labels.flatten(), boxes.flatten(0, 1)
    targets = F.one_hot(labels, CLASSES + 1)[:, :CLASSES].to(cls_scores)
    loss_cls = F.binary_cross_entropy_with_logits(cls_scores, targets, reduction="sum")
    pos = labels < CLASSES
    if pos.any():
        loss_bbox = F.l1_loss(bbox_preds[pos], boxes[pos], reduction="sum")
    else:
        loss_bbox = bbox_preds.sum() * 0
    return {"loss_cls": loss_cls / avg_factor, "loss_bbox": loss_bbox / avg_factor}


def loss(model, batch):
    num_pos = (batch["labels"] < CLASSES).sum().clamp(min=1)
    losses = head_losses(*model(batch["feats"]), batch["labels"], batch["boxes"], num_pos)
    return sum(losses.values())


def make_batch(generator):
    labels = torch.full((8, 9), CLASSES)
    found = torch.randint(0, CLASSES, (4, 5), generator=generator)
    labels[:4, 2:7] = found  # the images at the end show nothing
    return {
        "feats": torch.randn(8, 9, 6, generator=generator),
        "boxes": torch.randn(8, 9, 4, generator=generator),
        "labels": labels,
    }


case = Case(model=DenseHead, batch=make_batch, loss=loss, layout="1x4")


def reduce_mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


class Detector:
    def __init__(self, model):
        self.model = DDP(model)

    def get_avg_factor(self, labels):
        num_pos = (labels < CLASSES).sum().double()
        return reduce_mean(num_pos.clamp(min=1.0))

    def train_step(self, data):
        outs = self.model(data["feats"])
        avg_factor = self.get_avg_factor(data["labels"])
        losses = head_losses(*outs, data["labels"], data["boxes"], avg_factor)
        return {"loss": sum(losses.values()), "log_vars": {k: losses[k].item() for k in losses}}


def step(model, shard, rank):
    model.zero_grad()
    detector = Detector(model)
    outputs = detector.train_step(shard)
    outputs["loss"].backward()
