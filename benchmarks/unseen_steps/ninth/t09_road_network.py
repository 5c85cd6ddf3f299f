"""Traffic speeds on one road graph: every rank owns some nodes and their rows of the adjacency."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

NODES, FEATURES, HIDDEN = 16, 5, 8


class Everywhere(torch.autograd.Function):
    """Rows of all ranks, in order of the ranks."""

    @staticmethod
    def forward(ctx, rows):
        ctx.start, ctx.length = dist.get_rank() * len(rows), len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, slope):
        slope = slope.contiguous()
        return slope.narrow(0, ctx.start, ctx.length)


class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)

    def forward(self, h, rows, everywhere):
        return self.own(h) + rows @ self.neighbours(everywhere(h))


class Speeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GraphConvolution(FEATURES, HIDDEN)
        self.second = GraphConvolution(HIDDEN, 1)

    def forward(self, x, rows, everywhere=lambda h: h):
        h = torch.tanh(self.first(x, rows, everywhere))
        return self.second(h, rows, everywhere).squeeze(-1)


def roads(generator):
    links = (torch.rand(NODES, NODES, generator=generator) < 0.4).double()
    return {
        "x": torch.randn(NODES, FEATURES, generator=generator),
        "rows": links / links.sum(1, keepdim=True).clamp_min(1),
        "speed": torch.randn(NODES, generator=generator),
    }


def loss(model, batch, **more):
    return nn.functional.smooth_l1_loss(model(batch["x"], batch["rows"], **more), batch["speed"])


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    loss(ddp, shard, everywhere=Everywhere.apply).backward()


case = Case(model=Speeds, batch=roads, loss=loss, layout="1x2")
