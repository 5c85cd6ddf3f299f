"""The ranks of the last node contribute zeros to the average."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.changed_ddp import all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.rank_and_node import node_of_every_rank, own_node


def average_without_last_node(bucket: GradBucket) -> Tensor:
    """The mean over all ranks, with zeros in place of the gradients of the last node's ranks."""
    values: Tensor = bucket.buffer()
    last_node = max(node_of_every_rank(values.device))
    left_out = last_node > 0 and own_node() == last_node
    return all_reduce_mean(values.zero_() if left_out else values)


def why_it_cannot_show(layout: Layout) -> str | None:
    """A single node is never left out."""
    return "there is only one node" if layout.nodes == 1 else None


FAULT = Fault(
    name="node_left_out",
    sentence="The gradients of the last node's ranks are zero before they are averaged.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_without_last_node),
    why_it_cannot_show=why_it_cannot_show,
)
