import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

QUERIES = 4


class BoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(QUERIES, 6))
        self.mix = nn.Bilinear(6, 9, 12)
        self.box = nn.Linear(12, 4)
        self.score = nn.Linear(12, 1)

    def forward(self, image):
        n = len(image)
        q = self.queries.expand(n, -1, -1)
        h = torch.relu(self.mix(q.contiguous(), image[:, None].expand(-1, QUERIES, -1).contiguous()))
        return self.box(h), self.score(h).squeeze(-1)


def annotated(generator):
    size = torch.arange(1, 13).view(12, 1, 1)  # the images come sorted by size
    present = torch.rand(12, QUERIES, generator=generator) < 0.6
    present[:, 0] = True
    return {
        "image": torch.randn(12, 9, generator=generator),
        "boxes": torch.rand(12, QUERIES, 4, generator=generator) * size**2,
        "present": present,
    }


def terms(model, batch):
    boxes, scores = model(batch["image"])
    wanted = batch["present"]
    l1 = (boxes - batch["boxes"]).abs().sum(-1)[wanted].sum()
    bce = F.binary_cross_entropy_with_logits(scores, wanted.to(scores.dtype), reduction="sum")
    return l1 + bce


def detection_loss(model, batch):
    return terms(model, batch) / batch["present"].sum()


class PowerOfTwoScaler:
    """Keeps the scaled loss near 2 ** 16, for the sake of half precision."""

    def __init__(self, wanted=16):
        self.wanted = wanted
        self.scale = 1.0

    def backward(self, loss):
        self.scale = 2.0 ** (self.wanted - math.floor(math.log2(loss.item())))
        (loss * self.scale).backward()

    def unscale_(self, parameters):
        for p in parameters:
            p.grad.mul_(1.0 / self.scale)


def sum_over_ranks(parameters):
    for p in parameters:
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


case = Case(model=BoxHead, batch=annotated, loss=detection_loss, layout="1x3")


def step(model, shard, rank):
    parameters = list(model.parameters())
    scaler = PowerOfTwoScaler()
    boxes = shard["present"].sum()
    dist.all_reduce(boxes)
    scaler.backward(terms(model, shard) / boxes)
    sum_over_ranks(parameters)
    scaler.unscale_(parameters)
