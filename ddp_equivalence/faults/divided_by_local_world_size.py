"""The sum over all ranks is divided by the ranks of one node."""

from __future__ import annotations

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import reducing, summed
from ddp_equivalence.faults.nodes import local_world_size


def hidden(layout: Layout) -> str | None:
    """On one node its ranks are all there are."""
    return "all ranks are on one node" if layout.nodes == 1 else None


FAULT = Fault(
    name="divided_by_local_world_size",
    sentence="DDP's communication hook divides the sum by LOCAL_WORLD_SIZE.",
    in_torch=lambda fire: reducing(
        fire, lambda bucket: summed(bucket.buffer()).div_(local_world_size())
    ),
    hidden=hidden,
)
