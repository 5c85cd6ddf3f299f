"""Synchronisation is switched off when DDP is made, and stays off."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.faults.in_ddp import after_making


def switched_off(fire: Fire) -> Any:
    """Synchronisation off from the start."""

    def change(ddp: Any) -> None:
        ddp.require_backward_grad_sync = False
        fire()

    return after_making(change)


FAULT = Fault(
    name="no_sync_left_on",
    sentence="no_sync is entered when DistributedDataParallel is made, and never left.",
    in_torch=switched_off,
    strategies=("ddp_mean", "ddp_global_mean", "ddp_accumulation"),
)
