"""A gated MLP whose hidden units are split over two ranks, with data parallelism around it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, WIDTH, HIDDEN, EXAMPLES = 5, 8, 12, 16


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = GatedMLP()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, mlp=None) -> Tensor:
        x = self.embed(x)
        return self.head(x + (mlp or self.mlp)(self.norm(x)))


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelGatedMLP:
    """Column-parallel gate and up projections, and a row-parallel down projection."""

    def __init__(self, mlp: GatedMLP, group: dist.ProcessGroup) -> None:
        self.mlp, self.group = mlp, group
        self.index, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, weight: Tensor, dim: int) -> Tensor:
        return weight.chunk(self.size, dim=dim)[self.index]

    def __call__(self, x: Tensor) -> Tensor:
        shared = _CopyToGroup.apply(x, self.group)
        gate = F.linear(x, self.part(self.mlp.gate.weight, 0))
        up = F.linear(shared, self.part(self.mlp.up.weight, 0))
        partial = F.linear(F.silu(gate) * up, self.part(self.mlp.down.weight, 1))
        return _ReduceFromGroup.apply(partial, self.group)


def loss(model: nn.Module, batch: dict[str, Tensor], **kwargs) -> Tensor:
    return F.mse_loss(model(batch["x"], **kwargs), batch["y"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "y": torch.randn(EXAMPLES, 2, generator=generator),
    }


class Trainer:
    def __init__(self, model: Network) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        self.data, self.tensor = mesh.get_group("data"), mesh.get_group("tensor")
        self.model, self.mlp = model, ParallelGatedMLP(model.mlp, self.tensor)

    def local_rows(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        index, size = dist.get_rank(self.data), dist.get_world_size(self.data)
        return {key: value.chunk(size)[index] for key, value in batch.items()}

    def train_step(self, batch: dict[str, Tensor]) -> None:
        loss(self.model, self.local_rows(batch), mlp=self.mlp).backward()
        for parameter in self.model.mlp.parameters():  # the parts of the other ranks are zero
            dist.all_reduce(parameter.grad, group=self.tensor)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.data)
            parameter.grad /= dist.get_world_size(self.data)


case = Case(model=Network, batch=make_batch, loss=loss, layout="2x2", shards="own")


def step(model, shard, rank):
    Trainer(model).train_step(shard)
