"""DataParallel's sum inside a node, DDP's average between nodes.

DDP with one process per node, which drives several GPUs through nn.DataParallel, works like this.
Inside a node there is one loss over the node's examples, and the gradients of its replicas add up.
Between nodes, gradients are averaged.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.case.build import catalogue_loss_of
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks import process_state
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    layout = sharded_batch.layout
    if layout.world_size > 1 and sharded_batch.batch_coupled:
        return sharded_batch.batch_coupled
    one_rank_per_node = layout.nodes == layout.world_size
    return sharded_batch.cause_if_averaged(
        sharded_batch.shards_by_node,
        if_uneven="" if one_rank_per_node else "mean_of_node_means",
    )


def prepare(task: Task) -> TrainStep:
    layout, rank = task.case.ranks, task.rank
    loss = catalogue_loss_of(task.case, needed_by="hybrid")
    node_groups, leaders = process_groups(layout)
    node, leader = node_groups[rank.node], layout.ranks_on(rank.node)[0]

    def step(shard: Any) -> None:
        terms = loss.normalisers(shard)
        counts = torch.tensor(
            [term.count for term in terms], dtype=torch.float64, device=rank.device
        )
        dist.all_reduce(counts, group=node)
        value = torch.zeros((), device=rank.device)
        totals = loss.totals(task.model, task.model(shard["inputs"]), shard)
        for total, term, count in zip(totals, terms, counts.tolist(), strict=True):
            if term.kind == "once":
                value = value + total / rank.local_world_size
            else:
                value = value + (total / count if term.kind == "mean" else total)
        value.backward()
        reduce_gradients(task.model, divisor=1, group=node)
        if rank.rank == leader:
            reduce_gradients(task.model, divisor=rank.nodes, group=leaders)
        _take_from_leader(task, leader, node)

    return step


def process_groups(layout: Layout) -> tuple[tuple[dist.ProcessGroup, ...], dist.ProcessGroup]:
    """One group of ranks for each node, and one group of leaders: the first ranks of all nodes."""
    return _process_groups(layout, dist.group.WORLD)


@cache
def _process_groups(
    layout: Layout, _: object
) -> tuple[tuple[dist.ProcessGroup, ...], dist.ProcessGroup]:
    """Make the groups once for each world group: torch 2.13 hangs if a loop makes them anew.

    The second argument is the world group. It is only a key of the cache.
    """
    nodes = [layout.ranks_on(node) for node in range(layout.nodes)]
    groups = tuple(dist.new_group(list(ranks)) for ranks in nodes)
    leaders = dist.new_group([ranks[0] for ranks in nodes])
    for group in (*groups, leaders):
        process_state.keep_group(group)
    return groups, leaders


def _take_from_leader(task: Task, leader: int, node: dist.ProcessGroup) -> None:
    """Broadcast the leader's gradients to the other ranks of the node."""
    trained = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in trained])
    has_gradient = has_gradient.to(task.rank.device)
    dist.broadcast(has_gradient, src=leader, group=node)
    for parameter, leader_has_gradient in zip(trained, has_gradient.tolist(), strict=True):
        if not leader_has_gradient:
            continue
        # Sparse gradients cannot be broadcast, so they travel dense and are made sparse again.
        sparse = parameter.grad is not None and parameter.grad.is_sparse
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.to_dense() if sparse else gradient
        dist.broadcast(gradient, src=leader, group=node)
        parameter.grad = gradient.to_sparse(1) if sparse else gradient


STRATEGY = Strategy(
    name="hybrid",
    promise="The sum inside each node, averaged over nodes, is the gradient of the big batch if "
    "the loss is a mean and every node's loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    sums_in_nodes=True,
    needs_normalisers=True,
    # With these shards, nodes with different numbers of ranks have equally many examples.
    more_shards=(("1+3", "9+3+3+3"), ("3+1", "3+3+3+9")),
)
