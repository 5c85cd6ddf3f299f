"""Steps that give a wrapper or a communication hook a group or a number that is too small."""

# mypy: disable-error-code="arg-type, union-attr, index, no-any-return, name-defined"
# mypy: disable-error-code="call-overload, attr-defined"
# Users write their steps without asking whether there is a gradient.

from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Batch = dict[str, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


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


def shards_all_on_a_node(model: nn.Module, shard: Batch, rank: Any) -> dict[str, Tensor]:
    sharded = fully_shard(model, mesh=Meshes(rank).of_a_node)
    loss_of(sharded, shard).backward()
    return {name: whole(one.grad) for name, one in sharded.named_parameters()}
