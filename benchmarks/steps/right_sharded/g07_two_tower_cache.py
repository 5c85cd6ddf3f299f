"""Retrieval training with in-batch negatives from all ranks, in memory for one chunk only (gradient caching)."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case


@dataclass
class RetrievalConfig:
    chunk: int = 2
    temperature: float = 0.2
    dim: int = 8


CFG = RetrievalConfig()


class Tower(nn.Module):
    def __init__(self, size, dim):
        super().__init__()
        self.table = nn.EmbeddingBag(size, dim, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.LayerNorm(2 * dim), nn.Linear(2 * dim, dim))

    def forward(self, ids):
        return F.normalize(self.mlp(self.table(ids)), dim=1)


class TwoTower(nn.Module):
    def __init__(self, queries=31, items=43):
        super().__init__()
        self.query, self.item = Tower(queries, CFG.dim), Tower(items, CFG.dim)

    def forward(self, query_ids, item_ids):
        return self.query(query_ids), self.item(item_ids)


def sessions(generator):
    return torch.randint(0, 31, (12, 4), generator=generator), torch.randint(0, 43, (12, 6), generator=generator)


def symmetric_nce(q, d):
    scores = q @ d.t() / CFG.temperature
    target = torch.arange(len(q), device=q.device)
    return 0.5 * (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target))


def loss(model, batch):
    return symmetric_nce(*model(*batch))


class CachedStep:
    """Pass 1 encodes without a graph; the loss of the whole batch gives a gradient per embedding; pass 2 encodes each
    chunk again, with a graph, and sends its cached gradients through it."""

    def __init__(self, model, rank):
        for tower in (model.query, model.item):
            fully_shard(tower)
        self.model, self.rank, self.world = fully_shard(model), rank.rank, rank.world_size

    def everybodys(self, local):
        parts = [torch.empty_like(local) for _ in range(self.world)]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts).requires_grad_()

    def chunks(self, batch):
        return list(zip(*(part.split(CFG.chunk) for part in batch)))

    def cache(self, chunks):
        with torch.no_grad():
            encoded = [self.model(*chunk) for chunk in chunks]
        every = [self.everybodys(torch.cat(side)) for side in zip(*encoded)]
        symmetric_nce(*every).backward()
        # each rank has the whole loss and keeps the rows of its own examples; FSDP will average, hence the factor
        mine = [e.grad.chunk(self.world)[self.rank] * self.world for e in every]
        return list(zip(*(g.split(CFG.chunk) for g in mine)))

    def __call__(self, batch):
        chunks = self.chunks(batch)
        for number, (chunk, grads) in enumerate(zip(chunks, self.cache(chunks))):
            self.model.set_requires_gradient_sync(number == len(chunks) - 1)
            torch.autograd.backward(self.model(*chunk), grads)


def step(model, shard, rank):
    CachedStep(model, rank)(shard)
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=TwoTower, batch=sessions, loss=loss, layout="1x2")
