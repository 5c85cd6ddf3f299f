"""The sum over all ranks is divided by the number of ranks on one node."""

from __future__ import annotations

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.changed_ddp import all_reduce_sum, ddp_hook
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.rank_and_node import local_world_size


def why_it_cannot_show(layout: Layout) -> str | None:
    """On a single node, the local world size is the world size."""
    return "all ranks are on one node" if layout.nodes == 1 else None


FAULT = Fault(
    name="divided_by_local_world_size",
    sentence="DDP's communication hook divides the sum by LOCAL_WORLD_SIZE.",
    break_torch=lambda record_firing: ddp_hook(
        record_firing, lambda bucket: all_reduce_sum(bucket.buffer()).div_(local_world_size())
    ),
    why_it_cannot_show=why_it_cannot_show,
)
