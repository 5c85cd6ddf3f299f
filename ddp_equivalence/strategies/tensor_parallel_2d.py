"""Tensor parallelism inside each node, and fully_shard between the nodes, on one mesh."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.strategies.ddp_gathered import gathered_batch
from ddp_equivalence.strategies.hsdp import mesh_of_nodes
from ddp_equivalence.strategies.sharded_batch import Indices, ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_averaged(sharded_batch.shards_by_node)


def parts_by_rank(sharded_batch: ShardedBatch) -> tuple[tuple[Indices, ...], ...]:
    return tuple((sharded_batch.shards_by_node[row.node],) for row in sharded_batch.layout.rows)


def prepare(task: Task) -> TrainStep:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh_of_nodes(task)
    # The outputs of the first layer stay DTensors, which know their whole size: the hidden units
    # cannot be dealt evenly.
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    parallelize_module(task.model, mesh["ranks"], plan)
    fully_shard(task.model, mesh=mesh["nodes"])
    node = mesh.get_group("ranks")

    def step(shard: Any) -> None:
        # All ranks of a node compute with the same examples, as tensor parallelism needs it.
        batch, _ = gathered_batch(shard, task.rank.device, node)
        task.loss(task.model, batch).backward()

    return step


STRATEGY = Strategy(
    name="tensor_parallel_2d",
    promise="The ranks of a node share the computation for its examples, and the gradients are "
    "averaged over the nodes. This is the gradient of the big batch if the loss is a mean and "
    "every node's loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    parts_by_rank=parts_by_rank,
    tries_few_cases=True,
    takes=lambda model: model.name == "mlp",
    shards_parameters=True,
    needs_even_nodes=True,
    needs_several_nodes=True,
)
