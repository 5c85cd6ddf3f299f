"""DDP is given the group of its own node."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.hybrid import process_groups
from ddp_equivalence.strategies.strategy import Task, TrainStep


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
        if why_it_cannot_show(layout) is None:
            record_firing()

    return broken


def why_it_cannot_show(layout: Layout) -> str | None:
    """Something must be reduced in a node, and missing between nodes."""
    if layout.nodes == 1:
        return "there is only one node"
    if layout.nodes == layout.world_size:
        return "every node has only one rank"
    return None


FAULT = Fault(
    name="nodes_not_reduced",
    sentence="DistributedDataParallel is given the group of the ranks of its own node.",
    break_step=wrap_in_node,
    strategies=("ddp_mean",),
    why_it_cannot_show=why_it_cannot_show,
    own_step="",
)
