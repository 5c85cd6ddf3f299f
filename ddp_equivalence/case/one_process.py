"""Lets code run as in a process that has no process group, whatever this process is a member of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def without_process_group() -> Iterator[None]:
    """Inside the block, ``torch.distributed.is_initialized()`` is False.

    A loss may all-reduce where there is a group. The big batch is computed in one process, which
    can be a member of a group: that of rank 0 in process, or one of the caller's own.
    """
    member: Any = dist.GroupMember if dist.is_available() else None
    world = None if member is None else member.WORLD
    if world is None:
        yield
        return
    member.WORLD = None
    try:
        yield
    finally:
        member.WORLD = world
