"""A toy DETR head. Losses are divided by the number of boxes on all ranks, as in the paper's code."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

QUERIES, CLASSES, SIZE, IMAGES = 6, 4, 8, 8


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.queries = nn.Parameter(torch.randn(QUERIES, 8) / 3)
        self.boxes = nn.Linear(8, 4)
        self.labels = nn.Linear(8, CLASSES + 1)

    def forward(self, images):
        features = torch.relu(self.body(images)).flatten(2)  # b, 8, cells
        attention = torch.softmax(self.queries @ features, -1)
        slots = self.queries + attention @ features.transpose(1, 2)
        return self.labels(slots), self.boxes(slots).sigmoid()


def scenes(g):
    """The first images are the crowded ones. Slot q is matched to box q, if there is one."""
    count = torch.tensor([6, 5, 5, 4, 2, 1, 1, 2])
    present = torch.arange(QUERIES) < count[:, None]
    return {
        "images": torch.randn(IMAGES, 2, SIZE, SIZE, generator=g),
        "labels": torch.randint(0, CLASSES, (IMAGES, QUERIES), generator=g).where(present, CLASSES),
        "boxes": torch.rand(IMAGES, QUERIES, 4, generator=g),
    }


class Criterion:
    box_cost = 5.0

    def count(self, present):
        return present.sum().clamp(min=1).double()

    def __call__(self, outputs, batch):
        labels, boxes = outputs
        present = batch["labels"] != CLASSES
        number = self.count(present)
        ce = F.cross_entropy(labels.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        l1 = (boxes - batch["boxes"]).abs()[present].sum()
        return (ce + self.box_cost * l1) / number


class DistributedCriterion(Criterion):
    def count(self, present):
        number = present.sum().double()
        if dist.is_initialized():
            self.reduce(number)
        return torch.clamp(number / dist.get_world_size(), min=1)

    @staticmethod
    def reduce(value):
        """Adds up a number of all ranks; detached, since nobody needs its gradient."""
        value = value.detach().clone()
        dist.all_reduce(value)
        return value


def loss(model, batch):
    return Criterion()(model(batch["images"]), batch)


case = Case(model=Detector, batch=scenes, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    criterion = DistributedCriterion()
    criterion(ddp(shard["images"]), shard).backward()
