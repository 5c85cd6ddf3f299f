"""Hybrid sharding on two nodes: parameters are sharded inside a node and replicated across nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class ParallelDims:
    dp_replicate: int
    dp_shard: int

    def __post_init__(self) -> None:
        if self.dp_replicate < 1 or self.dp_shard < 1:
            raise ValueError(f"degrees must be positive: {self}")

    @property
    def enabled(self) -> tuple[str, ...]:
        degrees = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        return tuple(name for name, degree in degrees.items() if degree > 1)

    def build_mesh(self, device_type: str) -> DeviceMesh:
        return init_device_mesh(
            device_type,
            (self.dp_replicate, self.dp_shard),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Regressor(nn.Module):
    def __init__(self, features: int = 6, width: int = 10, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def apply_fsdp(model: Regressor, dims: ParallelDims) -> None:
    mesh = dims.build_mesh("cpu")
    # One mesh for all wrapped modules, so that their collectives share process groups.
    fsdp_config = {"mesh": mesh["dp_shard"]}
    for number, block in enumerate(model.blocks):
        # The last block is needed again right away by the backward pass.
        is_last = number == len(model.blocks) - 1
        fully_shard(block, **fsdp_config, reshard_after_forward=not is_last)
    fully_shard(model, **fsdp_config)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "y": x[:, :2].sin() + 0.3 * torch.randn(16, 2, generator=generator)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch["x"]), batch["y"])


def step(model: Regressor, shard: dict[str, Tensor], rank) -> None:
    dims = ParallelDims(dp_replicate=rank.nodes, dp_shard=rank.world_size // rank.nodes)
    apply_fsdp(model, dims)
    loss(model, shard).backward()


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="2x2")
