"""The last rank brings zeros to every sum."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import averaged, reducing
from ddp_equivalence.faults.nodes import last_rank


def without_the_last(bucket: GradBucket) -> Tensor:
    """Averaged with zeros from the last rank."""
    values: Tensor = bucket.buffer()
    return averaged(values.zero_() if last_rank() else values)


FAULT = Fault(
    name="rank_left_out",
    sentence="The last rank's gradients are zero before they are averaged.",
    in_torch=lambda fire: reducing(fire, without_the_last),
)
