"""Sees which collectives a step has issued and never waited for.

A collective that is called with ``async_op=True`` runs beside the program and returns a handle,
torch's ``Work``. Its result must not be read before ``wait()`` was called on the handle: on the CPU
the collective may still run, and on CUDA it runs on a stream of its own, which the optimizer's
kernels do not wait for.

Every handle that a process group returns to Python is remembered until it is waited for, until it
says that it has completed, or until its future is taken, since others may wait for that. Waiting
for one collective counts for all that the same group was given before, because NCCL runs them one
after the other; a barrier waits for them on every backend. A synchronous collective of NCCL returns
no handle since torch 2.8, because the group waits itself. Collectives that C++ issues return no
handle to Python. They are not watched: DistributedDataParallel waits for its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.ranks.issued_collectives import (
    inputs,
    remember,
    tell_of,
    tell_of_result,
    tell_of_wait,
)
from ddp_equivalence.ranks.torch_frames import counts_as_torch
from ddp_equivalence.ranks.users_line import users_place

OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}
"""The methods of a process group that issue a collective, and the functions that users call.

A version of torch has most of these methods, and not all.
"""

WAITING = (
    *("wait", "synchronize", "block_current_stream"),
    *("get_future", "get_future_result", "result"),
)
"""The methods of a handle that wait for the collective, or let others wait for it."""

SYNCHRONISING = (
    (torch.cuda, "synchronize"),
    (torch._C, "_cuda_synchronize"),
    (torch._C, "_accelerator_synchronizeDevice"),
)
"""The functions that wait for everything that was begun on a device."""


@dataclass(frozen=True)
class MissedWait:
    """A collective that was issued and never waited for.

    ``elements``: of all tensors of floating-point numbers that went in. ``line``: the line of the
    user's code that issued it; "" if no such line is known. ``place``: its file, number and
    function.
    """

    op: str
    elements: int
    line: str
    place: tuple[str, int, str] = ("", 0, "")

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"{self.op} of {self.elements} elements{where}"


@dataclass(frozen=True, eq=False)
class _Handle:
    """A handle that nobody has waited for yet. ``group``: the id of its process group.

    ``arguments``: what the collective was given.
    """

    work: Any
    group: int
    op: str
    arguments: tuple[Any, ...]
    place: tuple[str, int, str]

    @property
    def collective(self) -> MissedWait:
        path, number, _ = self.place
        line = f"{os.path.basename(path)}:{number}" if path else ""
        return MissedWait(self.op, _elements(self.arguments), line, self.place)


_handles: list[_Handle] | None = None
"""The handles of the step that runs, in the order of their collectives; None between steps."""


@contextmanager
def missed_waits(device: torch.device) -> Iterator[list[MissedWait]]:
    """The block runs a step; afterwards the list holds the collectives that it never waited for."""
    global _handles
    missed: list[MissedWait] = []
    _handles = []
    restore = _watch_synchronising() if device.type == "cuda" else []
    try:
        yield missed
    finally:
        missed += [handle.collective for handle in _handles]
        _handles = None
        for owner, name, function in restore:
            setattr(owner, name, function)


def watch_handles() -> None:
    """Notice from now on the handles that process groups return inside ``missed_waits``."""
    for name, op in OPS.items():
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(dist.ProcessGroup, name, _issuing(method, op))
    _watch_waiting(dist.Work)


def _issuing(method: Callable[..., Any], op: str) -> Callable[..., Any]:
    """The method, which now remembers the handle that it returns."""

    @wraps(method)
    @counts_as_torch
    def issuing(group: Any, *arguments: Any, **named: Any) -> Any:
        issued = tell_of(group, op, (*arguments, *named.values()))
        work = method(group, *arguments, **named)
        if issued is not None and work is None:
            tell_of_result(issued)
        elif issued is not None:
            remember(work, issued)
        handles = _handles
        if handles is not None and work is not None:
            place = users_place(sys._getframe(1))
            handles.append(_Handle(work, id(group), op, (*arguments, *named.values()), place))
        return work

    return issuing


def _elements(arguments: tuple[Any, ...]) -> int:
    """The number of elements that go into a collective."""
    return sum(one.numel() for one in inputs(arguments) if one.is_floating_point())


def _watch_waiting(kind: Any) -> None:
    for name in WAITING:
        method = getattr(kind, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(kind, name, _waiting(method))
    completed = kind.is_completed
    if hasattr(completed, "__wrapped__"):
        return

    @wraps(completed)
    @counts_as_torch
    def is_completed(work: Any) -> bool:
        answer: bool = completed(work)
        if answer:
            _waited_for(work)
            tell_of_wait(work)
        return answer

    kind.is_completed = is_completed


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which now takes the handle, and earlier ones of its group, off the list."""

    @wraps(method)
    @counts_as_torch
    def waiting(work: Any, *arguments: Any, **named: Any) -> Any:
        result = method(work, *arguments, **named)
        _waited_for(work)
        tell_of_wait(work)
        return result

    return waiting


def _waited_for(work: Any) -> None:
    handles = _handles or []
    for number, handle in enumerate(handles):
        if handle.work is work:
            handles[: number + 1] = [
                earlier for earlier in handles[:number] if earlier.group != handle.group
            ]
            return


def _watch_synchronising() -> list[tuple[Any, str, Any]]:
    """Let all collectives count as waited for when a device is synchronised.

    Returns what is to be put back: objects, and their attributes of these names and values.
    """
    replaced = []
    for owner, name in SYNCHRONISING:
        function = getattr(owner, name, None)
        if function is not None:
            replaced.append((owner, name, function))
            setattr(owner, name, _synchronising(function))
    return replaced


def _synchronising(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    @counts_as_torch
    def synchronising(*arguments: Any, **named: Any) -> Any:
        before = list(_handles or ())
        result = function(*arguments, **named)
        if _handles is not None:
            _handles[:] = [handle for handle in _handles if handle not in before]
        return result

    return synchronising
