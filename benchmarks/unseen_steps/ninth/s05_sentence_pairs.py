"""Sentence embeddings: each sentence must find its paraphrase among those of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB = 40
TEMPERATURE = 0.2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, 12, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6))

    def encode(self, ids):
        return F.normalize(self.mlp(self.bag(ids)), dim=-1)

    def forward(self, left, right):
        return self.encode(left), self.encode(right)


def pairs(generator):
    left = torch.randint(0, VOCAB, (12, 7), generator=generator)
    right = left.clone()
    swap = torch.rand(left.shape, generator=generator) < 0.4
    right[swap] = torch.randint(0, VOCAB, (int(swap.sum()),), generator=generator)
    return {"left": left, "right": right}


def info_nce(queries, keys, first=0):
    scores = queries @ keys.T / TEMPERATURE
    targets = torch.arange(first, first + len(queries), device=scores.device)
    return F.cross_entropy(scores, targets)


def loss(model, batch):
    left, right = model(batch["left"], batch["right"])
    return info_nce(left, right)


class Concat(torch.autograd.Function):
    """all_gather along the first dimension, to be used inside of a loss."""

    @staticmethod
    def forward(ctx, rows):
        ctx.rows = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        own = slice(dist.get_rank() * ctx.rows, (dist.get_rank() + 1) * ctx.rows)
        grad = grad.contiguous()
        return grad[own]


def step(model, shard, rank):
    ddp = DDP(model)
    left, right = ddp(shard["left"], shard["right"])
    keys = Concat.apply(right)
    info_nce(left, keys, first=rank.rank * len(left)).backward()


case = Case(model=Encoder, batch=pairs, loss=loss, layout="1x2")
