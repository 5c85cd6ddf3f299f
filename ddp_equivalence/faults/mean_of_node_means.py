"""Gradients are averaged inside each node, and then the nodes' means are averaged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.changed_ddp import ddp_hook
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.rank_and_node import node_of_every_rank


def average_node_means(bucket: GradBucket) -> Tensor:
    """The mean over nodes of the means over the ranks of each node."""
    values: Tensor = bucket.buffer()
    by_rank = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, values)
    node_of_rank = node_of_every_rank(values.device)
    means = [
        torch.stack(
            [by_rank[rank] for rank, rank_node in enumerate(node_of_rank) if rank_node == node]
        ).mean(0)
        for node in sorted(set(node_of_rank))
    ]
    return torch.stack(means).mean(0)


def why_it_cannot_show(layout: Layout) -> str | None:
    """If all nodes have equally many ranks, the mean of their means is the mean over all ranks."""
    sizes = {len(layout.ranks_on(node)) for node in range(layout.nodes)}
    return "all nodes have equally many ranks" if len(sizes) == 1 else None


FAULT = Fault(
    name="mean_of_node_means",
    sentence="DDP's communication hook averages inside each node and then over the nodes.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_node_means),
    why_it_cannot_show=why_it_cannot_show,
    own_step="on_unequal_nodes",
)
