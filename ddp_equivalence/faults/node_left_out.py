"""All ranks of the last node bring zeros to every sum."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import averaged, reducing
from ddp_equivalence.faults.nodes import node, nodes_of_all


def without_the_last_node(bucket: GradBucket) -> Tensor:
    """Averaged with zeros from the last node's ranks."""
    values: Tensor = bucket.buffer()
    last = max(nodes_of_all(values))
    return averaged(values.zero_() if last and node() == last else values)


def hidden(layout: Layout) -> str | None:
    """A node alone cannot be left out."""
    return "there is one node" if layout.nodes == 1 else None


FAULT = Fault(
    name="node_left_out",
    sentence="The gradients of the last node's ranks are zero before they are averaged.",
    in_torch=lambda fire: reducing(fire, without_the_last_node),
    hidden=hidden,
)
