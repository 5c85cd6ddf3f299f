"""Tensor parallelism by hand: every node is one replica, whose ranks hold columns, then rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH, HIDDEN, OUT, DEPTH = 6, 12, 3, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ResidualMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: dict) -> Tensor:
    return F.smooth_l1_loss(model(batch["x"]), batch["y"])


def rows(generator: torch.Generator) -> dict:
    return {
        "x": torch.randn(12, WIDTH, generator=generator),
        "y": 2 * torch.randn(12, OUT, generator=generator),
    }


case = Case(model=ResidualMLP, batch=rows, loss=loss, layout="2x2", shards="own")


class EnterParallel(torch.autograd.Function):
    """The same input goes to all ranks of the group, so that its gradients add up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class LeaveParallel(torch.autograd.Function):
    """The partial outputs of the ranks add up to the output that all of them go on with."""

    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        whole = partial.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Mesh:
    def __init__(self, rank):
        ranks = torch.arange(rank.world_size).view(rank.nodes, -1)
        tensor = [dist.new_group(row.tolist()) for row in ranks]
        data = [dist.new_group(column.tolist()) for column in ranks.T]
        self.tensor, self.data = tensor[rank.node], data[rank.local_rank]
        width = HIDDEN // rank.local_world_size
        self.mine = slice(rank.local_rank * width, (rank.local_rank + 1) * width)


def parallel_block(block: Block, x: Tensor, mesh: Mesh) -> Tensor:
    entered = EnterParallel.apply(block.norm(x), mesh.tensor)
    hidden = F.gelu(F.linear(entered, block.up.weight[mesh.mine], block.up.bias[mesh.mine]))
    partial = F.linear(hidden, block.down.weight[:, mesh.mine])
    return x + LeaveParallel.apply(partial, mesh.tensor)


def step(model: ResidualMLP, batch: dict, rank) -> None:
    mesh = Mesh(rank)
    replica = {name: tensor.chunk(rank.nodes)[rank.node] for name, tensor in batch.items()}
    x = replica["x"]
    for block in model.blocks:
        x = parallel_block(block, x, mesh)
    F.smooth_l1_loss(model.head(x), replica["y"]).backward()
    for name, parameter in model.named_parameters():
        if ".up." in name or ".down." in name:  # zero outside of this rank's slice
            dist.all_reduce(parameter.grad, group=mesh.tensor)
        dist.all_reduce(parameter.grad, group=mesh.data)
        parameter.grad /= rank.nodes
