"""DDP's hook hands buckets back as they came."""

from __future__ import annotations

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import reducing

FAULT = Fault(
    name="no_all_reduce",
    sentence="DDP's communication hook returns every bucket without reducing it.",
    in_torch=lambda fire: reducing(fire, lambda bucket: bucket.buffer()),
)
