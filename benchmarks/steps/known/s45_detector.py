"""A detector: box regression over the matched anchors, objectness over all anchors."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

ANCHORS = 5


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
        self.boxes = nn.Linear(10, 4)
        self.objectness = nn.Linear(10, 1)

    def forward(self, anchors):
        hidden = self.trunk(anchors)
        return self.boxes(hidden), self.objectness(hidden).squeeze(-1)


def criterion(model, batch, matched):
    boxes, scores = model(batch["anchors"])
    positive = batch["positive"]
    regression = F.l1_loss(boxes[positive], batch["boxes"][positive], reduction="sum")
    objectness = F.binary_cross_entropy_with_logits(scores, positive.to(scores.dtype))
    return regression / matched + objectness


def loss(model, batch):
    return criterion(model, batch, matched=batch["positive"].sum().clamp(min=1))


def make_batch(generator):
    # The second half of the data set are pictures of empty streets.
    positive = torch.rand(16, ANCHORS, generator=generator) < 0.4
    positive[0, 0] = positive[4, 0] = True
    positive[8:] = False
    return {
        "anchors": torch.randn(16, ANCHORS, 6, generator=generator),
        "boxes": torch.randn(16, ANCHORS, 4, generator=generator),
        "positive": positive,
    }


case = Case(model=Detector, batch=make_batch, loss=loss, layout="1x4")


def mean_matched(positive):
    """The number of matched anchors per rank, and never nought, since we divide by it."""
    matched = positive.sum().clamp(min=1).double()
    dist.all_reduce(matched)
    return matched / dist.get_world_size()


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def step(model, shard, rank):
    model.zero_grad()
    criterion(model, shard, matched=mean_matched(shard["positive"])).backward()
    average_gradients(model)
