"""The process groups that exist on a rank."""

from __future__ import annotations

import torch.distributed as dist


def existing_groups() -> dict[int, object]:
    """The process groups by ``id()``. The caller must keep them alive: ids are used again."""
    # The map of all groups is private in torch. Without it only the default group is known.
    known = getattr(dist.distributed_c10d._world, "pg_map", {})
    groups = (dist.group.WORLD, *known) if dist.is_initialized() else ()
    return {id(group): group for group in groups}
