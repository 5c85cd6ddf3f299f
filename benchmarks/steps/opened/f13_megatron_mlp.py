"""Tensor parallel MLP block after Megatron: fc1 by columns, fc2 by rows; two ranks share a block."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

TP = 2
INPUT, WIDTH, INNER, CLASSES = 6, 8, 12, 5


class ToTensorParallel(torch.autograd.Function):
    """Megatron's f: in front of the columns."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class FromTensorParallel(torch.autograd.Function):
    """Megatron's g: behind the rows."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return grad_output, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUT, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, INNER)
        self.fc2 = nn.Linear(INNER, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def mlp(self, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        if group is None:
            return self.fc2(F.gelu(self.fc1(x)))
        each = INNER // TP
        mine = slice(dist.get_rank(group) * each, (dist.get_rank(group) + 1) * each)
        x = ToTensorParallel.apply(x, group)
        x = F.gelu(F.linear(x, self.fc1.weight[mine], self.fc1.bias[mine]))
        return FromTensorParallel.apply(F.linear(x, self.fc2.weight[:, mine]), group)

    def forward(self, x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.mlp(self.norm(x), group))

    def sharded(self) -> list[nn.Parameter]:
        return [self.fc1.weight, self.fc1.bias, self.fc2.weight]


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(12, INPUT, generator=generator),
        "y": torch.randint(CLASSES, (12,), generator=generator),
    }


case = Case(
    model=Net,
    batch=batch,
    loss=lambda model, data: F.cross_entropy(model(data["x"]), data["y"]),
    layout="2x2",
)


def share(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(TP)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def step(model: Net, shard: dict[str, Tensor], rank) -> None:
    tensor_group, _ = dist.new_subgroups(TP)
    x, y = share(shard["x"], tensor_group), share(shard["y"], tensor_group)
    F.cross_entropy(model(x, tensor_group), y).backward()

    for p in model.sharded():  # zero outside of the slice: put the slices together
        dist.all_reduce(p.grad, group=tensor_group)
    data_groups = [dist.new_group([place, place + TP]) for place in range(TP)]
    for p in model.parameters():
        dist.all_reduce(p.grad, group=data_groups[rank.rank % TP])
        p.grad /= rank.world_size // TP
