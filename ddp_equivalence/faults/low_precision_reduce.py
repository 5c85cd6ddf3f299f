"""Buckets are averaged in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import averaged, reducing


def in_bfloat16(bucket: GradBucket) -> Tensor:
    """Averaged in bfloat16 and cast back."""
    values: Tensor = bucket.buffer()
    return values.copy_(averaged(values.to(torch.bfloat16)))


FAULT = Fault(
    name="low_precision_reduce",
    sentence="DDP's communication hook averages in bfloat16.",
    in_torch=lambda fire: reducing(fire, in_bfloat16),
    hidden=lambda layout: None,
)
