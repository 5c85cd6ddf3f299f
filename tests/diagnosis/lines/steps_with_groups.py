"""Steps that give a wrapper or a communication hook a group or a number that is too small."""

# mypy: disable-error-code="arg-type, union-attr, index, no-any-return, name-defined"
# mypy: disable-error-code="call-overload, attr-defined"
# Users write their steps without asking whether there is a gradient.

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Batch = dict[str, Tensor]
Future = torch.futures.Future[torch.Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def everywhere_until(epochs: int, batches: int) -> int:
    whole = epochs - 1
    return whole * batches


def local_from_the_beginning(model: nn.Module, shard: Batch, rank: Any) -> None:
    nodes, _ = dist.new_subgroups(rank.local_world_size)
    until = everywhere_until(epochs=1, batches=8)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(PostLocalSGDState(None, nodes, until), post_localSGD_hook)
    loss_of(ddp, shard).backward()


class Averaging:
    """Reduces over all ranks at every few steps, and else on the node."""

    def __init__(self, everywhere: Any, here: Any, period: int) -> None:
        self.everywhere, self.here = everywhere, here
        self.period = period
        self.steps = 1


@dataclass
class Settings:
    """What the user chose."""

    accumulation: int = 2


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Meshes:
    """The meshes of a job."""

    def __init__(self, rank: Any) -> None:
        shape = rank.nodes, rank.local_world_size
        self.all = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))

    @cached_property
    def of_a_node(self) -> DeviceMesh:
        return self.all["inner"]


def shards_the_last_on_a_node(model: nn.Module, shard: Batch, rank: Any) -> dict[str, Tensor]:
    meshes = Meshes(rank)
    for layer in list(model)[::2]:
        mesh = meshes.of_a_node if layer is model[-1] else meshes.all
        fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=meshes.all)
    loss_of(sharded, shard).backward()
    return {name: whole(one.grad) for name, one in sharded.named_parameters()}


class TwoParts(nn.Module):
    """Two parts, each wrapped by itself."""

    def __init__(self, model: Any, rank: Any) -> None:
        super().__init__()
        node = dist.new_subgroups(rank.local_world_size)[0]
        self.lower = DistributedDataParallel(model[:2])
        self.upper = DistributedDataParallel(model[2:], process_group=node)

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x))


def shards_all_on_a_node(model: nn.Module, shard: Batch, rank: Any) -> dict[str, Tensor]:
    sharded = fully_shard(model, mesh=Meshes(rank).of_a_node)
    loss_of(sharded, shard).backward()
    return {name: whole(one.grad) for name, one in sharded.named_parameters()}
