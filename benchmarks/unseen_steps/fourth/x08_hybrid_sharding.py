"""Hybrid sharding by hand: reduce-scatter within a shard group, all-reduce among replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class HybridMesh:
    """Groups of a mesh (replicas, shards); ranks of one node hold the shards of one replica."""

    shard_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    shards: int

    @classmethod
    def build(cls, rank: int, world_size: int, shards: int) -> HybridMesh:
        replicas = world_size // shards
        shard_group = replica_group = None
        for first in range(0, world_size, shards):
            members = list(range(first, first + shards))
            group = dist.new_group(members)
            if rank in members:
                shard_group = group
        for first in range(0, world_size, replicas):
            members = list(range(first, first + replicas))
            group = dist.new_group(members)
            if rank in members:
                replica_group = group
        return cls(shard_group, replica_group, shards)


class ShardedUnit:
    """The flattened parameters of one module, padded to a multiple of the shards."""

    def __init__(self, module: nn.Module, mesh: HybridMesh) -> None:
        self.parameters = list(module.parameters())
        self.mesh = mesh
        self.numel = sum(p.numel() for p in self.parameters)
        self.padded = -(-self.numel // mesh.shards) * mesh.shards

    def flat_gradient(self) -> Tensor:
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        return F.pad(flat, (0, self.padded - self.numel))

    def reduce(self, world_size: int) -> Tensor:
        """This rank's shard of the averaged gradient."""
        inputs = list(self.flat_gradient().div_(world_size).chunk(self.mesh.shards))
        shard = torch.empty_like(inputs[0])
        dist.reduce_scatter(shard, inputs, group=self.mesh.shard_group)
        dist.all_reduce(shard, group=self.mesh.replica_group)
        return shard

    def unshard_gradient(self, shard: Tensor) -> None:
        shards = [torch.empty_like(shard) for _ in range(self.mesh.shards)]
        dist.all_gather(shards, shard, group=self.mesh.shard_group)
        pieces = torch.cat(shards)[: self.numel].split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 13),
        nn.GELU(),
        nn.LayerNorm(13),
        nn.Linear(13, 11),
        nn.Tanh(),
        nn.Linear(11, 5),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(16, 7, generator=generator),
        "labels": torch.randint(5, (16,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="2x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    mesh = HybridMesh.build(rank, rank.world_size, shards=rank.local_world_size)
    units = [ShardedUnit(module, mesh) for module in model if list(module.parameters())]
    loss(model, shard).backward()
    for unit in reversed(units):
        unit.unshard_gradient(unit.reduce(rank.world_size))
