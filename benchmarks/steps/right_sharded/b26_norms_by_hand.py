"""HSDP without a division of gradients, and a norm that is put together from the local parts.

The mesh is named the other way round than the nodes lie: shards are spread over the nodes, and a
node has both replicas of its part. That costs time, and changes no gradient.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

MAX_NORM, LR = 0.07, 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Five and seven rows do not divide by two, and a single one leaves a rank without any.
        self.lower = nn.Sequential(nn.Linear(6, 5), nn.Hardtanh(), nn.Linear(5, 7))
        self.upper = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x)).squeeze(-1)


def mesh_across_nodes(rank: Rank) -> DeviceMesh:
    per_node = rank.world_size // rank.nodes
    ranks = torch.arange(rank.world_size).view(rank.nodes, per_node).T.contiguous()
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))


def shard_model(model: Net, mesh: DeviceMesh) -> Net:
    for part in (model.lower, model.upper, model):
        fully_shard(part, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model


@torch.no_grad()
def clip(model: nn.Module, mesh: DeviceMesh) -> float:
    """Every shard is there twice; its squares are to be counted once."""
    locals_ = [one.grad.to_local() for one in model.parameters()]
    total = torch.stack([part.square().sum() for part in locals_]).sum()
    dist.all_reduce(total, group=mesh["shard"].get_group())
    norm = math.sqrt(total.item())
    if norm > MAX_NORM:
        for part in locals_:
            part.mul_(MAX_NORM / norm)
    return norm


def clip_in_one_process(parameters: list[nn.Parameter]) -> None:
    norm = math.sqrt(sum(one.grad.square().sum().item() for one in parameters))
    for one in parameters:
        one.grad.mul_(min(1.0, MAX_NORM / norm))


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "y": (x[:, 0] * x[:, 1] > 0).double(), "weight": torch.linspace(0.2, 2, 16)}


def weighted_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        model(batch["x"]), batch["y"], weight=batch["weight"], reduction="sum"
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return weighted_sum(model, batch) / batch["weight"].sum()


def step(model: Net, shard: dict[str, Tensor], rank: Rank) -> None:
    mesh = mesh_across_nodes(rank)
    shard_model(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    whole = shard["weight"].sum()
    dist.all_reduce(whole)
    (weighted_sum(model, shard) / whole).backward()
    assert clip(model, mesh) > MAX_NORM
    optimizer.step()


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


case = Case(model=Net, batch=rows, loss=loss, layout="2x2")
options = {"compare": "update", "optimizer": make_optimizer, "clip": clip_in_one_process}
