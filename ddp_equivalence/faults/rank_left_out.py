"""The last rank contributes zeros to the average."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.rank_and_node import is_last_rank


def average_without_last_rank(bucket: GradBucket) -> Tensor:
    """The mean over all ranks, with zeros in place of the last rank's gradients."""
    values: Tensor = bucket.buffer()
    return all_reduce_mean(values.zero_() if is_last_rank() else values)


FAULT = Fault(
    name="rank_left_out",
    sentence="The last rank's gradients are zero before they are averaged.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_without_last_rank),
)
