"""A detector with a fixed set of queries. The box loss is a mean over the boxes of all ranks.

Many images are empty. They take part in the loss of the classes, but have no boxes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

QUERIES = 3

Batch = dict[str, Tensor]


class Detector(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(1, width, 3, stride=2)
        self.queries = nn.Embedding(QUERIES, width)
        self.objectness = nn.Linear(width, 1)
        self.box = nn.Linear(width, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pooled = torch.relu(self.backbone(images)).mean((2, 3))
        slots = torch.tanh(pooled.unsqueeze(1) + self.queries.weight)
        return self.objectness(slots).squeeze(-1), self.box(slots).sigmoid()


class SetCriterion:
    """Losses of matched queries. ``present`` (images, queries) says which have an object."""

    def __init__(self, box_weight: float = 5.0) -> None:
        self.box_weight = box_weight

    def labels(self, objectness: Tensor, batch: Batch) -> Tensor:
        target = batch["present"].to(objectness.dtype)
        return F.binary_cross_entropy_with_logits(objectness, target)

    def boxes(self, boxes: Tensor, batch: Batch) -> Tensor:
        error = F.l1_loss(boxes, batch["boxes"], reduction="none").sum(-1)
        return error[batch["present"]].sum()

    def __call__(self, model: nn.Module, batch: Batch, boxes_per_rank: Tensor) -> Tensor:
        objectness, boxes = model(batch["images"])
        box_loss = self.boxes(boxes, batch) / boxes_per_rank
        return self.labels(objectness, batch) + self.box_weight * box_loss


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return SetCriterion()(model, batch, batch["present"].sum().clamp(min=1))


def make_batch(generator: torch.Generator) -> Batch:
    objects = torch.tensor([2, 0, 1, 3, 0, 0, 0, 0, 1, 1, 2, 0])
    return {
        "images": torch.rand(12, 1, 9, 9, generator=generator),
        "boxes": torch.rand(12, QUERIES, 4, generator=generator),
        "present": torch.arange(QUERIES) < objects.unsqueeze(1),
    }


case = Case(model=Detector, batch=make_batch, loss=loss, layout="1x3")


def mean_boxes(present: Tensor, world_size: int) -> Tensor:
    """Boxes per rank, on average. It is never zero, since it is a divisor."""
    boxes = present.sum().double().clamp(min=1)
    dist.all_reduce(boxes)
    return boxes / world_size


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    criterion = SetCriterion()
    boxes_per_rank = mean_boxes(shard["present"], rank.world_size)
    criterion(ddp, shard, boxes_per_rank).backward()
