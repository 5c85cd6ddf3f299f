"""Intent detection with a tensor-parallel MLP: two ranks share the hidden units, two such pairs
share the data. All weights are kept in full; each rank computes with its half of them."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, HIDDEN, INTENTS, TP = 50, 16, 24, 5, 2


class Mesh(NamedTuple):
    tp: dist.ProcessGroup
    dp: dist.ProcessGroup
    tp_rank: int


def make_mesh(rank, world_size):
    found = {}
    for name, groups in {
        "tp": [range(first, first + TP) for first in range(0, world_size, TP)],
        "dp": [range(offset, world_size, TP) for offset in range(TP)],
    }.items():
        for members in groups:
            group = dist.new_group(list(members))
            if rank in members:
                found[name] = group
    return Mesh(found["tp"], found["dp"], rank % TP)


class Enter(torch.autograd.Function):
    """Identity forward; adds up over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Adds up over the group forward; identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Intents(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.classify = nn.Linear(WIDTH, INTENTS)

    def forward(self, ids, mesh=None):
        x = self.words(ids)
        return self.classify(x + self.feed_forward(self.norm(x), mesh))

    def feed_forward(self, x, mesh):
        if mesh is None:
            return self.down(F.gelu(self.up(x)))
        half = slice(mesh.tp_rank * HIDDEN // TP, (mesh.tp_rank + 1) * HIDDEN // TP)
        x = Enter.apply(x, mesh.dp)
        hidden = F.gelu(F.linear(x, self.up.weight[half], self.up.bias[half]))
        return Leave.apply(F.linear(hidden, self.down.weight[:, half]), mesh.tp) + self.down.bias


def utterances(generator):
    ids = torch.randint(VOCAB, (16, 6), generator=generator)
    return ids, torch.randint(INTENTS, (16,), generator=generator)


def loss(model, batch, **how):
    ids, intents = batch
    return F.cross_entropy(model(ids, **how), intents, label_smoothing=0.05)


case = Case(model=Intents, batch=utterances, loss=loss, layout="2x2")


def step(model, shard, rank):
    mesh = make_mesh(rank.rank, rank.world_size)
    rows = []
    for tensor in shard:  # the two ranks of a pair work on the rows of both
        parts = [torch.empty_like(tensor) for _ in range(TP)]
        dist.all_gather(parts, tensor, group=mesh.tp)
        rows.append(torch.cat(parts))
    loss(model, rows, mesh=mesh).backward()

    for split in (model.up.weight, model.up.bias, model.down.weight):
        dist.all_reduce(split.grad, group=mesh.tp)  # the other half is zero here
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.dp)
        p.grad /= rank.world_size // TP
