"""Causal attention over long recordings; the two GPUs of a node hold half of the time steps each.

Keys and values are gathered, queries stay where they are.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STEPS, SENSORS, WIDTH, CP = 8, 5, 8, 2


class GatherTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.steps = group, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.split(ctx.steps, dim=1)[dist.get_rank(ctx.group)], None


class Context:
    """Which time steps of the whole recording are here."""

    def __init__(self, group=None):
        self.group = group
        self.place = 0 if group is None else dist.get_rank(group)

    def whole(self, x):
        return x if self.group is None else GatherTime.apply(x, self.group)

    def offset(self, x):
        return self.place * x.shape[1]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(SENSORS, WIDTH)
        self.position = nn.Embedding(STEPS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, SENSORS)

    def attend(self, x, context):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = context.whole(k), context.whole(v)
        rows = torch.arange(q.shape[1], device=x.device)
        columns = torch.arange(k.shape[1], device=x.device)
        scores = q @ k.transpose(1, 2) / math.sqrt(WIDTH)
        scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
        return scores.softmax(-1) @ v

    def forward(self, x, context):
        steps = context.offset(x) + torch.arange(x.shape[1], device=x.device)
        x = self.read(x) + self.position(steps)
        return self.out(x + self.attend(x, context))


def recordings(generator):
    signal = torch.randn(8, STEPS + 1, SENSORS, generator=generator).cumsum(1)
    return {"now": signal[:, :-1].clone(), "next": signal[:, 1:].clone()}


def loss(model, batch, context=None):
    return F.mse_loss(model(batch["now"], context or Context()), batch["next"])


case = Case(model=Forecaster, batch=recordings, loss=loss, layout="2x2")


def cut_in_time(x, group):
    parts = [torch.empty_like(x) for _ in range(CP)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts).chunk(CP, dim=1)[dist.get_rank(group)].contiguous()


def step(model, shard, rank):
    group, _ = dist.new_subgroups(CP)
    local = {name: cut_in_time(x, group) for name, x in shard.items()}
    ddp = DistributedDataParallel(model)
    loss(ddp, local, Context(group)).backward()
