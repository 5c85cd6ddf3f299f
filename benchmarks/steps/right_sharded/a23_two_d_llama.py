"""Tensor parallelism inside a node, fully_shard across nodes, on a small gated MLP stack."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from ddp_equivalence import Case


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Layer(8, 12) for _ in range(2))
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


PLAN = {
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
}


def parallelize(model: Stack, mesh: DeviceMesh) -> Stack:
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks of the group: those of a node compute the same rows together."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(16, 5, generator=generator)
    return {"x": x, "label": (x @ torch.arange(1.0, 6.0)).abs().long() % 6}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


def step(model: Stack, shard: dict[str, Tensor], rank) -> None:
    mesh = init_device_mesh(
        "cpu", (rank.nodes, rank.world_size // rank.nodes), mesh_dim_names=("dp", "tp")
    )
    parallelize(model, mesh)
    rows = {name: gathered(tensor, mesh.get_group("tp")) for name, tensor in shard.items()}
    loss(model, rows).backward()


case = Case(model=Stack, batch=make_batch, loss=loss, layout="2x2")
