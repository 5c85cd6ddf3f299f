"""Cracks in turbine blades: focal loss over anchors, divided by the number of positive anchors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

BLADES, ANCHORS, FEATURES = 8, 10, 7
ALPHA, GAMMA = 0.25, 2.0


class AnchorHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        self.score = nn.Linear(8, 1)
        nn.init.constant_(self.score.bias, -2.0)

    def forward(self, anchors):
        return self.score(self.tower(anchors)).squeeze(-1)


def make_batch(generator):
    """Most blades are sound: few anchors are positive (1), some are ignored (-1)."""
    labels = torch.zeros(BLADES, ANCHORS)
    labels[torch.rand(BLADES, ANCHORS, generator=generator) < 0.1] = -1
    labels[0, 3] = labels[1, 7] = labels[1, 8] = 1
    return {
        "anchors": torch.randn(BLADES, ANCHORS, FEATURES, generator=generator),
        "labels": labels,
    }


def focal_sum(scores, labels):
    keep = labels >= 0
    scores, labels = scores[keep], labels[keep]
    chance = scores.sigmoid()
    hit = chance * labels + (1 - chance) * (1 - labels)
    alpha = ALPHA * labels + (1 - ALPHA) * (1 - labels)
    raw = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return (alpha * (1 - hit) ** GAMMA * raw).sum()


def loss(model, batch):
    positives = (batch["labels"] == 1).sum().clamp(min=1)
    return focal_sum(model(batch["anchors"]), batch["labels"]) / positives


class Normaliser:
    """Mean number of positives per rank, as DDP averages over ranks."""

    def __init__(self, world_size):
        self.world_size = world_size

    def __call__(self, labels):
        positives = (labels == 1).sum().to(torch.float64)
        # a batch of sound blades must not divide by zero
        positives = positives.clamp(min=1)
        dist.all_reduce(positives)
        return positives / self.world_size


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    normaliser = Normaliser(rank.world_size)
    total = focal_sum(ddp(shard["anchors"]), shard["labels"])
    (total / normaliser(shard["labels"])).backward()


case = Case(model=AnchorHead, batch=make_batch, loss=loss, layout="1x2")
