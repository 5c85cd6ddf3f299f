"""Lets a step start and end the process group as a script does, though its rank has one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.torch_frames import counts_as_torch

FUNCTIONS = ("init_process_group", "destroy_process_group")


class _GroupOfAScript:
    """The group of a rank while a step runs, as the step sees it.

    The first ``init_process_group`` of the step keeps the group that the rank has, whatever backend
    it asks for: that of the lane is used. After ``destroy_process_group`` there is none, as far as
    the step can see, until it starts one again.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._world: Any = dist.group.WORLD
        self._groups = {id(group) for group in _groups()}
        self.was_started = False

    def can_be_started(self) -> bool:
        """True if a script would have no group now."""
        return not self.was_started or dist.group.WORLD is None

    def start(self, rank: int, world_size: int) -> str:
        """Returns what is wrong if the script asks for another rank or number of ranks, else ""."""
        for name, asked, own in (
            ("rank", rank, self._rank.rank),
            ("world_size", world_size, self._rank.world_size),
        ):
            if asked not in (-1, own):
                return (
                    f"init_process_group({name}={asked}) on a rank that has {name} {own}: leave "
                    f"{name} out, or take it from the argument rank of the step"
                )
        self.was_started = True
        self.set_world(self._world)
        return ""

    def end(self, destroy: Any) -> None:
        """Hide the rank's group, and destroy those that the step has made with ``destroy``."""
        if not self.was_started:
            _report_early_destruction()
        for group in _groups():
            if group is not self._world and id(group) not in self._groups:
                destroy(group)
        self.set_world(None)

    def set_world(self, group: object) -> None:
        member: Any = dist.GroupMember
        member.WORLD = group

    def restore(self) -> None:
        self.set_world(self._world)


_current: list[_GroupOfAScript] = []
"""The group of the step that runs now, if one runs."""


@contextmanager
def as_a_script_has_them(rank: Rank) -> Iterator[None]:
    """In the block, a step may call ``init_process_group`` and ``destroy_process_group``.

    It finds the group of the rank initialised at first, so that it may also do without these calls.
    Afterwards the rank has its group again.
    """
    originals = {name: getattr(dist, name) for name in FUNCTIONS}
    replace_functions()
    _current.append(_GroupOfAScript(rank))
    try:
        yield
    finally:
        _current.pop().restore()
        for name, function in originals.items():
            _set(name, function)


def replace_functions() -> None:
    """Replace torch's two functions by ones that ask whether a step runs.

    A process that is nothing but a rank does this before it imports modules of the user, which may
    take the functions out of ``torch.distributed`` by name. Without a step they are torch's own.
    """
    if hasattr(dist.init_process_group, "__of_a_script__"):
        return
    init, destroy = (getattr(dist, name) for name in FUNCTIONS)

    @wraps(init)
    @counts_as_torch
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        if not _current or not _current[-1].can_be_started():
            init(*arguments, **keywords)  # torch says what is wrong with a second call
            return
        # init_process_group(backend, init_method, timeout, world_size, rank, ...)
        given = dict(zip(("world_size", "rank"), arguments[3:5], strict=False)) | keywords
        wrong = _current[-1].start(int(given.get("rank", -1)), int(given.get("world_size", -1)))
        if wrong:
            raise ValueError(wrong)

    @wraps(destroy)
    @counts_as_torch
    def destroy_process_group(group: Any = None) -> None:
        world = dist.group.WORLD
        if not _current or world is None or group not in (None, world):
            destroy(group)
            return
        _current[-1].end(destroy)

    for name, function in zip(FUNCTIONS, (init_process_group, destroy_process_group), strict=True):
        function.__of_a_script__ = True  # type: ignore[attr-defined]
        _set(name, function)


def _set(name: str, function: Any) -> None:
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)


def _groups() -> list[Any]:
    """The process groups that exist. The map is private in torch; without it none is known."""
    return list(getattr(dist.distributed_c10d._world, "pg_map", {}))


def _report_early_destruction() -> None:
    """Report a step that destroys the group it was given while a DDP object still uses it.

    In torch 2.13 such a DDP object can deadlock the process when it is freed: its destructor waits
    for a thread that needs the global interpreter lock, which the destructor holds. Ranks avoid
    this by keeping their group.
    """
    if any(isinstance(value, DistributedDataParallel) for value in gc.get_objects()):
        process_state.report_change(
            "process group destroyed while a DistributedDataParallel was alive: torch 2.13 "
            "deadlocks when that wrapper is freed later, so delete the wrapper first"
        )
