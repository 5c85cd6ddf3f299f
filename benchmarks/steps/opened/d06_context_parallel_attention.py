"""Long sequences are cut along time; every rank attends from its piece to the keys and values of all."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

BATCH, TIME, DIM = 8, 12, 8


def attend(q, k, v, visible):
    scores = q @ k.transpose(1, 2) / DIM**0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(3, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.write = nn.Linear(DIM, 3)

    def forward(self, x):
        h = self.read(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        time = torch.arange(x.shape[1])
        return self.write(h + attend(q, k, v, time[:, None] >= time[None, :]))


def loss(model, batch):
    return F.mse_loss(model(batch["series"]), batch["future"])


def make_batch(generator):
    return {
        "series": torch.randn(BATCH, TIME, 3, generator=generator),
        "future": torch.randn(BATCH, TIME, 3, generator=generator),
    }


class GatherTime(torch.autograd.Function):
    """All pieces in order; in backward, the sum over ranks of what they hold for this piece."""

    @staticmethod
    def forward(ctx, piece):
        ctx.length = piece.shape[1]
        pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, piece.contiguous())
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.length
        return grad[:, start : start + ctx.length]


class ContextParallel:
    def __init__(self, model):
        self.model = model
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.piece = TIME // self.world

    def cut(self, x):
        return x.narrow(1, self.rank * self.piece, self.piece)

    def visible(self):
        queries = torch.arange(self.piece)
        keys = torch.arange(TIME)
        return queries[:, None] >= keys[None, :]

    def __call__(self, series):
        h = self.model.read(self.cut(series))
        q, k, v = self.model.qkv(h).chunk(3, -1)
        mixed = attend(q, GatherTime.apply(k), GatherTime.apply(v), self.visible())
        return self.model.write(h + mixed)


def step(model, shard, rank):
    parallel = ContextParallel(model)
    F.mse_loss(parallel(shard["series"]), parallel.cut(shard["future"])).div(parallel.world).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


case = Case(model=Layer, batch=make_batch, loss=loss, layout="1x3", shards="own")
