"""Megatron's MLP by hand: two ranks share the hidden units, two such pairs share the rows."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

INP, EMBED, HIDDEN, CLASSES = 7, 10, 16, 4
CLASS_WEIGHT = (1.0, 2.0, 0.5, 3.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(INP, EMBED)
        self.up = nn.Linear(EMBED, HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.down(F.gelu(self.up(torch.tanh(self.embed(x)))))


def rows(g):
    return {
        "x": torch.randn(16, INP, generator=g),
        "y": torch.randint(0, CLASSES, (16,), generator=g),
    }


def loss(model, b):
    logits = model(b["x"])
    return F.cross_entropy(logits, b["y"], weight=logits.new_tensor(CLASS_WEIGHT))


class Grid:
    """Rank = 2 * data + tensor."""

    def __init__(self, rank):
        self.data, self.tensor = divmod(rank.rank, 2)
        tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.tp, self.dp = tensor_groups[self.data], data_groups[self.tensor]


class Enter(torch.autograd.Function):
    """Into the parallel region."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


class Leave(torch.autograd.Function):
    """Out of the parallel region."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def parallel_forward(net, x, grid):
    part = slice(grid.tensor * HIDDEN // 2, (grid.tensor + 1) * HIDDEN // 2)
    x = Enter.apply(torch.tanh(net.embed(x)), grid.tp)
    h = F.gelu(F.linear(x, net.up.weight[part], net.up.bias[part]))
    out = F.linear(h, net.down.weight[:, part], net.down.bias)
    return Leave.apply(out, grid.tp)


case = Case(model=Net, batch=rows, loss=loss, layout="2x2", shards="own")


def step(model, b, rank):
    grid = Grid(rank)
    x, y = b["x"].chunk(2)[grid.data], b["y"].chunk(2)[grid.data]
    weight = x.new_tensor(CLASS_WEIGHT)
    total_weight = weight[y].sum()
    dist.all_reduce(total_weight, group=grid.dp)
    logits = parallel_forward(model, x, grid)
    (F.cross_entropy(logits, y, weight=weight, reduction="sum") / total_weight).backward()
    for sliced in (model.up.weight, model.up.bias, model.down.weight):
        dist.all_reduce(sliced.grad, group=grid.tp)
    for p in model.parameters():
        dist.all_reduce(p.grad, group=grid.dp)
