"""DDP's communication hook returns buckets without reducing them."""

from __future__ import annotations

from ddp_equivalence.faults.changed_ddp import ddp_hook
from ddp_equivalence.faults.fault import Fault

FAULT = Fault(
    name="no_all_reduce",
    sentence="DDP's communication hook returns every bucket without reducing it.",
    break_torch=lambda record_firing: ddp_hook(record_firing, lambda bucket: bucket.buffer()),
)
