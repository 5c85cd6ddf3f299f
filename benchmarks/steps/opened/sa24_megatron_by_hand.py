"""Tensor parallelism written out: column-parallel, then row-parallel, on the ranks of one node."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

IN, WIDTH, HIDDEN, OUT = 5, 8, 12, 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(IN, WIDTH)
        self.mlps = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for mlp in self.mlps:
            x = mlp(x)
        return self.head(x)


class CopyToGroup(torch.autograd.Function):
    """The same tensor on all ranks of the group, each of which uses it for its own columns."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.contiguous(), None


class SumOverGroup(torch.autograd.Function):
    """The sum over the group; its gradient is the same on all ranks already."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ParallelMlp(nn.Module):
    def __init__(self, mlp: Mlp, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mlp, self.group = mlp, group
        size, part = dist.get_world_size(group), dist.get_rank(group)
        columns = slice(part * HIDDEN // size, (part + 1) * HIDDEN // size)
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        mlp, mine = self.mlp, self.columns
        y = CopyToGroup.apply(mlp.norm(x), self.group)
        y = F.gelu(F.linear(y, mlp.up.weight[mine], mlp.up.bias[mine]))
        return x + SumOverGroup.apply(F.linear(y, mlp.down.weight[:, mine]), self.group)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(12, IN, generator=generator)
    return {"x": x, "y": x[:, :OUT].tanh()}


def step(model: Net, batch: dict[str, Tensor], rank) -> None:
    ranks = torch.arange(rank.world_size).view(rank.nodes, -1)
    tensor_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    data_group, _ = dist.new_subgroups_by_enumeration(ranks.t().tolist())
    # Both ranks of a node compute the node's part of the batch.
    mine = {name: tensor.chunk(rank.nodes)[rank.node] for name, tensor in batch.items()}
    slices = [p for mlp in model.mlps for p in (mlp.up.weight, mlp.up.bias, mlp.down.weight)]
    model.mlps = nn.ModuleList(ParallelMlp(mlp, tensor_group) for mlp in model.mlps)
    loss(model, mine).backward()
    for parameter in slices:  # zero outside the rank's own columns
        dist.all_reduce(parameter.grad, group=tensor_group)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=data_group)
        parameter.grad /= rank.nodes
    model.mlps = nn.ModuleList(parallel.mlp for parallel in model.mlps)


case = Case(model=Net, batch=make_batch, loss=loss, layout="2x2", shards="own")
