"""Ranks or nodes are missing in the sum, or count in it more than once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.changed_ddp import after_ddp_init, all_reduce_mean, ddp_hook
from ddp_equivalence.faults.changed_sums import after_each_sum
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.faults.rank_and_node import is_last_rank, node_of_every_rank, own_node
from ddp_equivalence.ranks import process_state
from ddp_equivalence.strategies.hybrid import process_groups
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep

# The ranks of the last node contribute zeros to the average.


def average_without_last_node(bucket: GradBucket) -> Tensor:
    """The mean over all ranks, with zeros in place of the gradients of the last node's ranks."""
    values: Tensor = bucket.buffer()
    last_node = max(node_of_every_rank(values.device))
    left_out = last_node > 0 and own_node() == last_node
    return all_reduce_mean(values.zero_() if left_out else values)


def needs_two_nodes(layout: Layout) -> str | None:
    """A single node is never left out."""
    return "there is only one node" if layout.nodes == 1 else None


NODE_LEFT_OUT = Fault(
    name="node_left_out",
    sentence="The gradients of the last node's ranks are zero before they are averaged.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_without_last_node),
    why_it_cannot_show=needs_two_nodes,
)


# DDP is given the group of its own node.


def wrap_in_node(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step whose DDP reduces among the ranks of one node."""
    layout = task.case.ranks
    groups, _ = process_groups(layout)
    devices = [task.rank.device] if task.rank.device.type == "cuda" else None
    ddp = DistributedDataParallel(
        task.model, device_ids=devices, process_group=groups[task.rank.node]
    )

    def broken(shard: Any) -> None:
        task.loss(ddp, shard).backward()
        if needs_nodes_of_several_ranks(layout) is None:
            record_firing()

    return broken


def needs_nodes_of_several_ranks(layout: Layout) -> str | None:
    """Something must be reduced in a node, and missing between nodes."""
    if layout.nodes == 1:
        return "there is only one node"
    if layout.nodes == layout.world_size:
        return "every node has only one rank"
    return None


NODES_NOT_REDUCED = Fault(
    name="nodes_not_reduced",
    sentence="DistributedDataParallel is given the group of the ranks of its own node.",
    break_step=wrap_in_node,
    strategies=("ddp_mean",),
    why_it_cannot_show=needs_nodes_of_several_ranks,
    own_step="",
)


# The last rank freezes the first parameter after the model was wrapped.


def freeze_on_last_rank(record_firing: RecordFiring) -> Any:
    """Freeze the first parameter on the last rank, after DDP was made."""

    def change(ddp: Any) -> None:
        trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        if is_last_rank():
            trained[0].requires_grad_(False)
            record_firing()

    # Without find_unused_parameters, the other ranks would wait forever for the bucket of this one.
    return after_ddp_init(change, find_unused_parameters=True)


PARAMETER_FROZEN_ON_ONE_RANK = Fault(
    name="parameter_frozen_on_one_rank",
    sentence="The last rank sets requires_grad of the first parameter to False.",
    break_torch=freeze_on_last_rank,
    acts_at=("wrap",),
)


# The last rank contributes zeros to the average.


def average_without_last_rank(bucket: GradBucket) -> Tensor:
    """The mean over all ranks, with zeros in place of the last rank's gradients."""
    values: Tensor = bucket.buffer()
    return all_reduce_mean(values.zero_() if is_last_rank() else values)


RANK_LEFT_OUT = Fault(
    name="rank_left_out",
    sentence="The last rank's gradients are zero before they are averaged.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_without_last_rank),
)


# Gradients are reduced between two neighbouring ranks each, and nothing joins these pairs.


def reduce_in_pairs(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that all-reduces gradients in groups of two ranks."""
    pairs = _pairs(task.rank.world_size, dist.group.WORLD)
    ranks, group = pairs[task.rank.rank // 2]

    def broken(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        reduce_gradients(task.model, divisor=len(ranks), group=group)
        if len(pairs) > 1:
            record_firing()

    return broken


@cache
def _pairs(world_size: int, _: object) -> tuple[tuple[range, dist.ProcessGroup], ...]:
    """The groups, made once for each world group: torch 2.13 hangs if a loop makes them anew."""
    ranks_of_pairs = [range(first, min(first + 2, world_size)) for first in range(0, world_size, 2)]
    pairs = tuple((ranks, dist.new_group(list(ranks))) for ranks in ranks_of_pairs)
    for _, group in pairs:
        process_state.keep_group(group)
    return pairs


def needs_two_pairs(layout: Layout) -> str | None:
    """Two ranks are a single pair."""
    return "there is only one pair of ranks" if layout.world_size < 3 else None


REDUCED_IN_WRONG_GROUP = Fault(
    name="reduced_in_wrong_group",
    sentence="The step all-reduces gradients in groups of two ranks, and nothing joins them.",
    break_step=reduce_in_pairs,
    strategies=("manual_all_reduce_mean",),
    why_it_cannot_show=needs_two_pairs,
    own_step="",
)


# ``torch.distributed.all_reduce`` of a gradient is called once more by every call.


def reduce_twice(record_firing: RecordFiring) -> AbstractContextManager[None]:
    """``dist.all_reduce`` adds gradients up, and then adds up the sums."""
    return after_each_sum(record_firing, lambda sum_again, tensor: sum_again())


REDUCED_MORE_THAN_ONCE = Fault(
    name="reduced_more_than_once",
    sentence="torch.distributed.all_reduce adds gradients up over the ranks twice.",
    break_torch=reduce_twice,
    strategies=("manual_all_reduce_mean",),
    own_step="by_hand",
    acts_at=("all_reduce",),
)
