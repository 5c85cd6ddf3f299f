"""The process groups that exist on a rank, and a warning about destroying one too early."""

from __future__ import annotations

import gc
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.ranks import process_state


def existing_groups() -> dict[int, object]:
    """The process groups by ``id()``. The caller must keep them alive: ids are used again."""
    # The map of all groups is private in torch. Without it only the default group is known.
    known = getattr(dist.distributed_c10d._world, "pg_map", {})
    groups = (dist.group.WORLD, *known) if dist.is_initialized() else ()
    return {id(group): group for group in groups}


def report_early_destruction() -> None:
    """From now on, report a step that destroys a group while a DDP object still uses it.

    In torch 2.13 such a DDP object deadlocks the process when it is freed: its destructor waits for
    a thread that needs the global interpreter lock, which the destructor holds. Ranks avoid this by
    keeping a reference to the group, but a training script would hang.
    """
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def destroy_process_group(*arguments: Any, **keywords: Any) -> None:
        if any(isinstance(value, DistributedDataParallel) for value in gc.get_objects()):
            process_state.report_change(
                "process group destroyed while a DistributedDataParallel was alive: torch 2.13 "
                "deadlocks when that wrapper is freed later, so delete the wrapper first"
            )
        destroy(*arguments, **keywords)

    dist.destroy_process_group = destroy_process_group
    dist.distributed_c10d.destroy_process_group = destroy_process_group
