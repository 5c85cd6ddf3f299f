"""Dual encoder for retrieval. Every query is compared with the passages of all ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PAIRS, QUERY_SIZE, PASSAGE_SIZE, SPACE = 12, 7, 9, 6


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(QUERY_SIZE, 16), nn.Tanh(), nn.Linear(16, SPACE))
        self.passage = nn.Sequential(nn.Linear(PASSAGE_SIZE, 16), nn.Tanh(), nn.Linear(16, SPACE))
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, queries, passages):
        q = F.normalize(self.query(queries), dim=-1)
        p = F.normalize(self.passage(passages), dim=-1)
        return q, p, self.log_scale.exp()


class GatherRows(torch.autograd.Function):
    """all_gather whose backward brings home the gradients that other ranks have for our rows."""

    @staticmethod
    def forward(ctx, rows):
        ctx.rows = rows.shape[0]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        first = dist.get_rank() * ctx.rows
        return grad[first : first + ctx.rows]


def pairs(g):
    return torch.randn(PAIRS, QUERY_SIZE, generator=g), torch.randn(PAIRS, PASSAGE_SIZE, generator=g)


def in_batch_loss(q, p, scale, positives):
    return F.cross_entropy(scale * q @ p.T, positives, label_smoothing=0.05)


def loss(model, batch):
    q, p, scale = model(*batch)
    return in_batch_loss(q, p, scale, torch.arange(len(q)))


def positives_of(queries, rank):
    return torch.arange(len(queries))


def step(model, shard, rank):
    ddp = DDP(model)
    q, p, scale = ddp(*shard)
    everyone = GatherRows.apply(p)
    in_batch_loss(q, everyone, scale, positives_of(q, rank.rank)).backward()


case = Case(model=DualEncoder, batch=pairs, loss=loss, layout="1x3")
