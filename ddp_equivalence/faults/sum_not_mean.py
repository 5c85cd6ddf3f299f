"""DDP adds up the gradients of all ranks, and does not divide the sum."""

from __future__ import annotations

from ddp_equivalence.faults.changed_ddp import all_reduce_sum, ddp_hook
from ddp_equivalence.faults.fault import Fault

FAULT = Fault(
    name="sum_not_mean",
    sentence="DDP's communication hook adds up gradients and does not divide.",
    break_torch=lambda record_firing: ddp_hook(
        record_firing, lambda bucket: all_reduce_sum(bucket.buffer())
    ),
)
