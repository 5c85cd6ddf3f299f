"""Retrieval: every query is scored against the documents of all ranks, on several nodes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

TEMPERATURE = 0.3


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.document = nn.Linear(5, 4)

    def forward(self, batch):
        queries = F.normalize(self.query(batch["query"]), dim=1)
        documents = F.normalize(self.document(batch["document"]), dim=1)
        return queries, documents


def in_batch_negatives(queries, documents):
    scores = queries @ documents.T / TEMPERATURE
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def loss(model, batch):
    return in_batch_negatives(*model(batch))


def make_batch(generator):
    return {
        "query": torch.randn(12, 6, generator=generator),
        "document": torch.randn(12, 5, generator=generator),
    }


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="2x2")


class FeaturePool:
    """Collects features of all ranks. Only this rank's own rows carry a gradient."""

    def __init__(self, rank):
        self.slot = rank.local_rank
        self.world_size = rank.world_size

    def collect(self, features):
        parts = [torch.empty_like(features) for _ in range(self.world_size)]
        dist.all_gather(parts, features.detach().contiguous())
        parts[self.slot] = features
        return torch.cat(parts)


def step(model, shard, rank):
    pool = FeaturePool(rank)
    model.zero_grad()
    queries, documents = model(shard)
    # The same loss on all ranks; each differentiates it by its own rows.
    in_batch_negatives(pool.collect(queries), pool.collect(documents)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
