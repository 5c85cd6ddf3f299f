"""DDP averages gradients in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault, shows_everywhere


def average_in_bfloat16(bucket: GradBucket) -> Tensor:
    """The mean over all ranks, computed in bfloat16 and cast back."""
    values: Tensor = bucket.buffer()
    return values.copy_(all_reduce_mean(values.to(torch.bfloat16)))


FAULT = Fault(
    name="low_precision_reduce",
    sentence="DDP's communication hook averages in bfloat16.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_in_bfloat16),
    why_it_cannot_show=shows_everywhere,
)
