"""The mean inside every node, then the mean of these."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import reducing
from ddp_equivalence.faults.nodes import nodes_of_all


def of_node_means(bucket: GradBucket) -> Tensor:
    """Gathered, averaged inside each node, and then over the nodes."""
    values: Tensor = bucket.buffer()
    every = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    nodes = nodes_of_all(values)
    means = [
        torch.stack([one for one, of in zip(every, nodes, strict=True) if of == node]).mean(0)
        for node in sorted(set(nodes))
    ]
    return torch.stack(means).mean(0)


def hidden(layout: Layout) -> str | None:
    """Of equal nodes the mean of means is the mean."""
    sizes = {len(layout.ranks_on(node)) for node in range(layout.nodes)}
    return "all nodes have equally many ranks" if len(sizes) == 1 else None


FAULT = Fault(
    name="mean_of_node_means",
    sentence="DDP's communication hook averages inside each node and then over the nodes.",
    in_torch=lambda fire: reducing(fire, of_node_means),
    hidden=hidden,
)
