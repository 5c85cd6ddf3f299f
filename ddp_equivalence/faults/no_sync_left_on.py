"""DDP's gradient synchronisation is switched off when DDP is made, and stays off."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.changed_ddp import after_ddp_init
from ddp_equivalence.faults.fault import Fault, RecordFiring

FLAG = "require_backward_grad_sync"


def switch_sync_off(record_firing: RecordFiring) -> Any:
    """Switch synchronisation off as soon as DDP is made; a script cannot switch it on again."""

    def change(ddp: Any) -> None:
        kind = type(ddp)
        stays_off = {FLAG: property(lambda self: False, lambda self, value: None)}
        ddp.__class__ = type(kind.__name__, (kind,), {**stays_off, "__module__": kind.__module__})
        record_firing()

    return after_ddp_init(change)


FAULT = Fault(
    name="no_sync_left_on",
    sentence="no_sync is entered when DistributedDataParallel is made, and never left.",
    break_torch=switch_sync_off,
    strategies=("ddp_mean", "ddp_global_mean", "ddp_accumulation"),
    acts_at=("wrap",),
)
