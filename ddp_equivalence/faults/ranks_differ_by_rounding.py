"""The last bit of the averaged gradients is another one on every second rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault


def average_and_round(bucket: GradBucket) -> Tensor:
    """The mean over all ranks; on odd ranks the next larger number."""
    values = all_reduce_mean(bucket.buffer())
    if dist.get_rank() % 2 == 0:
        return values
    return values.copy_(torch.nextafter(values, torch.full_like(values, torch.inf)))


FAULT = Fault(
    name="ranks_differ_by_rounding",
    sentence="After DDP has averaged, odd ranks hold the next larger numbers.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_and_round),
)
