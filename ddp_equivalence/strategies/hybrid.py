"""DataParallel's sum inside a node, DDP's average between nodes.

What one process per node that drives several GPUs used to do: inside the node one loss over the
node's batch, whose replicas' gradients add up; between the nodes an average.
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
from ddp_equivalence.strategies.sharded_batch import Facts
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def breaks(facts: Facts) -> str | None:
    if facts.layout.world_size > 1 and facts.batch_coupled:
        return facts.batch_coupled
    one_each = facts.layout.nodes == facts.layout.world_size
    return facts.mean_over(facts.node_shards, uneven="" if one_each else "mean_of_node_means")


def prepare(task: Task) -> TrainStep:
    layout, rank = task.case.ranks, task.rank
    loss = catalogue_loss_of(task.case, needed_by="hybrid")
    nodes, leaders = process_groups(layout)
    node, leader = nodes[rank.node], layout.ranks_on(rank.node)[0]

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
    """One group a node, and one of the first rank of every node."""
    return _process_groups(layout, dist.group.WORLD)


@cache
def _process_groups(
    layout: Layout, _: object
) -> tuple[tuple[dist.ProcessGroup, ...], dist.ProcessGroup]:
    """Made once in the life of the ranks: made and destroyed in a loop, they hang torch 2.13."""
    ranks = [layout.ranks_on(node) for node in range(layout.nodes)]
    groups = tuple(dist.new_group(list(of_node)) for of_node in ranks)
    leaders = dist.new_group([of_node[0] for of_node in ranks])
    for group in (*groups, leaders):
        process_state.keep_group(group)
    return groups, leaders


def _take_from_leader(task: Task, leader: int, node: dist.ProcessGroup) -> None:
    parameters = [one for one in task.model.parameters() if one.requires_grad]
    used = torch.tensor([float(one.grad is not None) for one in parameters])
    used = used.to(task.rank.device)
    dist.broadcast(used, src=leader, group=node)
    for parameter, wanted in zip(parameters, used.tolist(), strict=True):
        if not wanted:
            continue
        # Sparse gradients cannot be broadcast; the layout is restored afterwards.
        sparse = parameter.grad is not None and parameter.grad.is_sparse
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.to_dense() if sparse else gradient
        dist.broadcast(gradient, src=leader, group=node)
        parameter.grad = gradient.to_sparse(1) if sparse else gradient


STRATEGY = Strategy(
    name="hybrid",
    promise="The sum inside a node, averaged between nodes, is the big batch if the loss is a "
    "mean and every node's loss divides by the same number.",
    breaks=breaks,
    prepare=prepare,
    sums_in_nodes=True,
)
