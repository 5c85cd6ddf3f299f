"""Symbolic music: long pieces are cut over the ranks of a node (context parallel), pieces over nodes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

NOTES, LENGTH, WIDTH = 19, 12, 10


class Composer(nn.Module):
    def __init__(self):
        super().__init__()
        self.note = nn.Embedding(NOTES, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, NOTES)

    def forward(self, notes, context=None):
        context = context or WholePiece()
        length = notes.shape[1]
        x = self.note(notes) + self.position(context.positions(length))
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        k, v = context.gather(k), context.gather(v)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill(~context.visible(length, k.shape[1]), float("-inf"))
        return self.out(x + scores.softmax(dim=-1) @ v)


class GatherParts(torch.autograd.Function):
    """Keys or values of the whole piece; their gradients come back from all parts."""

    @staticmethod
    def forward(ctx, x, group, index, size):
        ctx.group, ctx.index, ctx.size = group, index, size
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.size, dim=1)[ctx.index], None, None, None


class WholePiece:
    def positions(self, length):
        return torch.arange(length)

    def gather(self, x):
        return x

    def visible(self, queries, keys):
        return torch.ones(queries, keys, dtype=torch.bool).tril()


class PartOfPiece(WholePiece):
    """The part of a piece that lies on one rank of a group."""

    def __init__(self, group, index, size):
        self.group, self.index, self.size = group, index, size

    def positions(self, length):
        return torch.arange(length) + self.index * length

    def gather(self, x):
        return GatherParts.apply(x, self.group, self.index, self.size)

    def cut(self, x):
        return x.chunk(self.size, dim=1)[self.index]


def pieces(generator):
    notes = torch.randint(NOTES, (8, LENGTH + 1), generator=generator)
    return {"notes": notes[:, :-1], "next": notes[:, 1:]}


def loss(model, batch):
    return F.cross_entropy(model(batch["notes"]).flatten(0, 1), batch["next"].flatten())


def groups_of_nodes(rank):
    size = rank.local_world_size
    groups = [dist.new_group([n * size + i for i in range(size)]) for n in range(rank.nodes)]
    return groups[rank.node]


def step(model, batch, rank):
    context = PartOfPiece(groups_of_nodes(rank), rank.local_rank, rank.local_world_size)
    mine = {name: value.chunk(rank.nodes)[rank.node] for name, value in batch.items()}
    logits = model(context.cut(mine["notes"]), context)
    F.cross_entropy(logits.flatten(0, 1), context.cut(mine["next"]).flatten()).backward()
    # all parts are equally long
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


case = Case(model=Composer, batch=pieces, loss=loss, layout="2x2", shards="own")
