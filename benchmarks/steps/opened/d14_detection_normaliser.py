"""Detector on a row of anchors: class for every anchor, box where an object is, both divided by the objects."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

IMAGES, ANCHORS, CHANNELS, CLASSES = 12, 6, 5, 3


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(CHANNELS, 8, 3, padding=1), nn.ReLU())
        self.classify = nn.Conv1d(8, CLASSES + 1, 1)
        self.locate = nn.Conv1d(8, 2, 1)

    def forward(self, images):
        h = self.backbone(images)
        return self.classify(h).transpose(1, 2), self.locate(h).transpose(1, 2)


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


class SetCriterion:
    def __init__(self, no_object=0.1, box=2.0, distributed=False):
        self.weights = torch.ones(CLASSES + 1)
        self.weights[0] = no_object
        self.box = box
        self.distributed = distributed

    def num_boxes(self, labels):
        count = (labels > 0).sum().clamp(min=1).double()
        if self.distributed:
            dist.all_reduce(count)
            count = count / world_size()
        return count

    def loss_labels(self, logits, labels):
        weights = self.weights.to(logits)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weights, reduction="none").sum()

    def loss_boxes(self, boxes, wanted, labels):
        error = F.l1_loss(boxes, wanted, reduction="none").sum(-1)
        return (error * (labels > 0)).sum()

    def __call__(self, outputs, targets):
        logits, boxes = outputs
        labels = targets["labels"]
        total = self.loss_labels(logits, labels) + self.box * self.loss_boxes(boxes, targets["boxes"], labels)
        return total / self.num_boxes(labels)


def loss(model, batch):
    return SetCriterion()(model(batch["images"]), batch)


def make_batch(generator):
    """The last images come from a set of empty backgrounds."""
    labels = torch.randint(CLASSES + 1, (IMAGES, ANCHORS), generator=generator)
    labels[2 * IMAGES // 3 :] = 0
    return {
        "images": torch.randn(IMAGES, CHANNELS, ANCHORS, generator=generator),
        "labels": labels,
        "boxes": torch.rand(IMAGES, ANCHORS, 2, generator=generator),
    }


class Engine:
    def __init__(self, model):
        self.model = DistributedDataParallel(model)
        self.criterion = SetCriterion(distributed=True)

    def train_one_batch(self, batch):
        self.criterion(self.model(batch["images"]), batch).backward()


def step(model, shard, rank):
    Engine(model).train_one_batch(shard)


case = Case(model=Detector, batch=make_batch, loss=loss, layout="1x3")
