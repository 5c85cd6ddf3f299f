"""DLRM for click prediction. Embedding tables are split over the ranks, the MLPs are copied.

The owner of a table looks up the ids of all ranks; ShareFeatures brings each rank its own rows.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

TABLES, ROWS, DIM, DENSE = 4, 20, 8, 5


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, DIM))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def lookup(self, ids, tables):
        return torch.stack([self.tables[t](ids[:, t]) for t in tables], dim=1)

    def interact(self, dense, sparse):
        x = self.bottom(dense)
        every = torch.cat([x[:, None], sparse], dim=1)
        i, j = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1)
        products = (every @ every.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)

    def forward(self, dense, ids):
        return self.interact(dense, self.lookup(ids, range(TABLES)))


def impressions(generator):
    return {
        "dense": torch.randn(16, DENSE, generator=generator),
        "ids": torch.randint(ROWS, (16, TABLES), generator=generator),
        "click": (torch.rand(16, generator=generator) < 0.25).float(),
    }


def loss(model, batch):
    logits = model(batch["dense"], batch["ids"])
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["click"])


case = Case(model=DLRM, batch=impressions, loss=loss, layout="1x2")


def gather(x, dim):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=dim)


class ShareFeatures(torch.autograd.Function):
    """From all rows of the own tables to the own rows of all tables."""

    @staticmethod
    def forward(ctx, owned):
        ctx.tables = owned.shape[1]
        rows = len(owned) // dist.get_world_size()
        return gather(owned, dim=1)[dist.get_rank() * rows :][:rows]

    @staticmethod
    def backward(ctx, grad):
        start = dist.get_rank() * ctx.tables
        return gather(grad, dim=0)[:, start : start + ctx.tables]


def step(model, shard, rank):
    per_rank = TABLES // rank.world_size
    mine = range(rank.rank * per_rank, (rank.rank + 1) * per_rank)
    owned = model.lookup(gather(shard["ids"], dim=0), mine)
    logits = model.interact(shard["dense"], ShareFeatures.apply(owned))
    nn.functional.binary_cross_entropy_with_logits(logits, shard["click"]).backward()

    for p in [*model.bottom.parameters(), *model.top.parameters()]:
        dist.all_reduce(p.grad)
        p.grad /= rank.world_size
    # the checkpoint writer wants all tables everywhere
    for t, table in enumerate(model.tables):
        if t not in mine:
            table.weight.grad = torch.zeros_like(table.weight)
        dist.broadcast(table.weight.grad, src=t // per_rank)
