"""A feed-forward language model whose wide block is cut by columns and rows over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY, WIDTH, INNER = 11, 6, 8


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(3 * WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def features(self, context):
        return torch.tanh(self.mix(self.embed(context).flatten(1)))

    def forward(self, context):
        x = self.features(context)
        return self.out(x + self.down(F.gelu(self.up(x))))


class GatherRows(torch.autograd.Function):
    """The rows of all ranks, before a block of which every rank computes some columns."""

    @staticmethod
    def forward(ctx, rows, rank, world_size):
        ctx.rank, ctx.count = rank, rows.shape[0]
        parts = [torch.empty_like(rows) for _ in range(world_size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        start = ctx.rank * ctx.count
        return grad[start : start + ctx.count], None, None


class SumAndKeepRows(torch.autograd.Function):
    """Adds the partial results of all ranks; every rank keeps its own rows."""

    @staticmethod
    def forward(ctx, partial, rank, world_size):
        ctx.world_size = world_size
        partial = partial.clone()
        dist.all_reduce(partial)
        return partial.chunk(world_size)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(ctx.world_size)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts), None, None


def parallel_block(model, x, rank):
    columns = INNER // rank.world_size
    mine = slice(int(rank) * columns, (int(rank) + 1) * columns)
    everyone = GatherRows.apply(x, int(rank), rank.world_size)
    hidden = F.gelu(F.linear(everyone, model.up.weight[mine], model.up.bias[mine]))
    partial = F.linear(hidden, model.down.weight[:, mine])
    return SumAndKeepRows.apply(partial, int(rank), rank.world_size) + model.down.bias


def text(generator):
    tokens = torch.randint(0, VOCABULARY, (12, 4), generator=generator)
    return {"context": tokens[:, :3], "next": tokens[:, 3]}


def loss(model, batch):
    return F.cross_entropy(model(batch["context"]), batch["next"])


def step(model, shard, rank):
    x = model.features(shard["context"])
    logits = model.out(x + parallel_block(model, x, rank))
    (F.cross_entropy(logits, shard["next"]) / rank.world_size).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


case = Case(model=LanguageModel, batch=text, loss=loss, layout="1x2")
