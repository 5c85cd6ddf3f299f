"""Hybrid sharding: fully_shard inside each node, and an all-reduce of the shards between nodes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks import process_state
from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.fsdp2 import shard_layers
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def prepare(task: Task) -> TrainStep:
    shard_layers(task.model, mesh=mesh_of_nodes(task))

    def step(shard: Any) -> None:
        task.loss(task.model, shard).backward()

    return step


def mesh_of_nodes(task: Task) -> DeviceMesh:
    """A mesh with one row of ranks for each node."""
    return _mesh_of_nodes(task.case.ranks, task.rank.device.type, dist.group.WORLD)


@cache
def _mesh_of_nodes(layout: Layout, device: str, _: object) -> DeviceMesh:
    """It is made once for each world group, since torch 2.13 hangs if a loop makes groups anew; the
    last argument is that group, and only a key of the cache.
    """
    from torch.distributed.device_mesh import DeviceMesh

    ranks = [list(layout.ranks_on(node)) for node in range(layout.nodes)]
    mesh = DeviceMesh(device, ranks, mesh_dim_names=("nodes", "ranks"))
    for group in mesh.get_all_groups():
        process_state.keep_group(group)
    return mesh


STRATEGY = Strategy(
    name="hsdp",
    promise="Each node shards the model and averages its gradients, and the nodes average their "
    "shards; together the shards of a node are the gradient of the big batch if the loss is a "
    "mean and every rank's loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    takes=lambda model: model.can_be_sharded,
    shards_parameters=True,
    needs_even_nodes=True,
)
