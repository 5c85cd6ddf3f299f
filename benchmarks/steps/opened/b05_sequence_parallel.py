# Every rank holds a slice of each sequence. Queries stay local, keys and values are gathered.
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

V, D, T, N = 19, 8, 12, 6


class GatherTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local):
        world = dist.get_world_size()
        ctx.start, ctx.size = dist.get_rank() * local.shape[1], local.shape[1]
        parts = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        return grad.narrow(1, ctx.start, ctx.size)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x, offset=0, gather=None):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if gather is not None:
            k, v = gather(k), gather(v)
        scores = q @ k.transpose(1, 2) / math.sqrt(D)
        rows = torch.arange(q.shape[1])[:, None] + offset
        future = torch.arange(k.shape[1])[None, :] > rows
        return self.out(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.pos = nn.Embedding(T, D)
        self.att = Attention()
        self.head = nn.Linear(D, V)

    def forward(self, ids, offset=0, gather=None):
        places = torch.arange(ids.shape[1]) + offset
        x = self.tok(ids) + self.pos(places)
        x = x + self.att(x, offset, gather)
        return self.head(x)


def make(generator):
    text = torch.randint(0, V, (N, T + 1), generator=generator)
    return {"inputs": text[:, :T].clone(), "targets": text[:, 1:].clone()}


def full_loss(model, b):
    return F.cross_entropy(model(b["inputs"]).flatten(0, 1), b["targets"].flatten())


case = Case(model=LM, batch=make, loss=full_loss, layout="1x3", shards="own")


def step(model, b, rank):
    size = T // rank.world_size
    mine = slice(rank.rank * size, (rank.rank + 1) * size)
    logits = model(b["inputs"][:, mine], offset=mine.start, gather=GatherTime.apply)
    total = F.cross_entropy(logits.flatten(0, 1), b["targets"][:, mine].flatten(), reduction="sum")
    (total / b["targets"].numel()).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
