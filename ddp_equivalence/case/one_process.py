"""Lets code run as in a process that has no process group, whatever this process is a member of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist


@contextmanager
def without_process_group() -> Iterator[None]:
    """Inside the block, ``torch.distributed.is_initialized()`` is False.

    A loss may all-reduce where there is a group. The big batch is computed in one process, which
    can be a member of a group: that of rank 0 in process, or one of the caller's own. Where the
    code runs a collective without asking whether there is a group, it gets a group of this process
    alone, so that a sum over ranks is the process's own value. The block ends that group.
    """
    member: Any = dist.GroupMember if dist.is_available() else None
    if member is None:
        yield
        return
    world = member.WORLD
    member.WORLD = None
    try:
        with nullcontext() if _forbidden else _group_of_one_where_asked_for(member):
            yield
    finally:
        member.WORLD = world


@contextmanager
def no_group_of_one() -> Iterator[None]:
    """Inside the block, a collective of the big batch's loss raises torch's own error."""
    _forbidden.append(True)
    try:
        yield
    finally:
        _forbidden.pop()


_forbidden: list[bool] = []


@contextmanager
def _group_of_one_where_asked_for(member: Any) -> Iterator[None]:
    """Every collective of torch.distributed asks one private function for the default group."""
    c10d: Any = dist.distributed_c10d
    asked, groups, count = c10d._get_default_group, set(c10d._world.pg_map), c10d._world.group_count

    def default_group() -> Any:
        if not dist.is_initialized():
            c10d._get_default_group = asked
            store: Any = dist.HashStore()  # type: ignore[attr-defined]  # no stubs
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return asked()

    c10d._get_default_group = default_group
    try:
        yield
    finally:
        c10d._get_default_group = asked
        member.WORLD = None  # so that torch ends these groups, and no others
        for group in set(c10d._world.pg_map) - groups:
            dist.destroy_process_group(group)
        # Other ranks count the groups of this process's own group too, and name the next by it.
        c10d._world.group_count = count
