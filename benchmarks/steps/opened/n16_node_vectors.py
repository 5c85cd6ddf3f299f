"""Vectors for the nodes of a graph by negative sampling; only the rows in use are exchanged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

NODES, EDGES, DIM, NEGATIVES = 15, 24, 6, 3


class NodeVectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(NODES, DIM, sparse=True)
        self.context = nn.Embedding(NODES, DIM, sparse=True)

    def forward(self, source, targets):
        return torch.einsum("ed,etd->et", self.vectors(source), self.context(targets))


def make_batch(generator):
    def draw(*shape):
        return torch.randint(NODES, shape, generator=generator)

    return {"source": draw(EDGES), "target": draw(EDGES), "noise": draw(EDGES, NEGATIVES)}


def loss(model, batch):
    targets = torch.cat([batch["target"][:, None], batch["noise"]], dim=1)
    scores = model(batch["source"], targets)
    return F.softplus(-scores[:, 0]).mean() + F.softplus(scores[:, 1:]).sum(1).mean()


class SparseExchange:
    """Sends (row numbers, rows) instead of the table, which is nearly all zeros in production."""

    def __init__(self, world_size):
        self.world_size = world_size

    def average(self, parameter):
        grad = parameter.grad.coalesce()
        packed = (grad.indices()[0], grad.values() / self.world_size)
        received = [None] * self.world_size
        dist.all_gather_object(received, packed)
        rows = torch.cat([rows for rows, _ in received])
        values = torch.cat([values for _, values in received])
        dense = torch.zeros_like(parameter)
        dense[rows] = values
        parameter.grad = dense


def step(model, shard, rank):
    loss(model, shard).backward()
    exchange = SparseExchange(rank.world_size)
    with torch.no_grad():
        for parameter in model.parameters():
            exchange.average(parameter)


case = Case(model=NodeVectors, batch=make_batch, loss=loss, layout="1x2")
