"""Fraud scores trained on a surrogate of the AUC: all frauds against all honest payments."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PAYMENTS, FEATURES = 20, 8


def build():
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.Tanh(), nn.Linear(10, 1), nn.Flatten(0))


def make_batch(generator):
    fraud = torch.zeros(PAYMENTS)
    fraud[torch.randperm(PAYMENTS, generator=generator)[:6]] = 1
    return {
        "features": torch.randn(PAYMENTS, FEATURES, generator=generator),
        "fraud": fraud,
    }


def pair_sum(scores_a, weight_a, scores_b, weight_b):
    """Squared surrogate of every pair (a fraud, b honest); a weight of 0 leaves a row out."""
    gap = 1 - (scores_a[:, None] - scores_b[None])
    return (gap.square() * weight_a[:, None] * weight_b[None]).sum()


def loss(model, batch):
    scores, fraud = model(batch["features"]), batch["fraud"]
    return pair_sum(scores, fraud, scores, 1 - fraud) / (fraud.sum() * (1 - fraud).sum())


class AllScores:
    """Scores and labels of all ranks, in the order of the ranks."""

    def __init__(self, scores, fraud):
        self.fraud = torch.cat(self._gathered(fraud))
        parts = self._gathered(scores.detach())
        parts[dist.get_rank()] = scores
        self.scores = torch.cat(parts)

    @staticmethod
    def _gathered(local):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return parts

    @property
    def pairs(self):
        frauds = self.fraud.sum()
        return frauds * (len(self.fraud) - frauds)


def step(model, shard, rank):
    ddp = DDP(model)
    scores, fraud = ddp(shard["features"]), shard["fraud"]
    everyone = AllScores(scores, fraud)
    # The pairs in which a fraud is mine, and those in which an honest payment is mine.
    mine_above = pair_sum(scores, fraud, everyone.scores, 1 - everyone.fraud)
    mine_below = pair_sum(everyone.scores, everyone.fraud, scores, 1 - fraud)
    total = (mine_above + mine_below) / everyone.pairs
    (rank.world_size * total).backward()


case = Case(model=build, batch=make_batch, loss=loss)
