"""DDP sums gradients over the ranks and does not divide."""

from __future__ import annotations

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import reducing, summed

FAULT = Fault(
    name="sum_not_mean",
    sentence="DDP's communication hook adds up gradients and does not divide.",
    in_torch=lambda fire: reducing(fire, lambda bucket: summed(bucket.buffer())),
)
