"""Sees which collectives a step has issued and never waited for.

A collective that is called with ``async_op=True`` runs beside the program and returns a handle,
torch's ``Work``. Its result must not be read before ``wait()`` was called on the handle: on the CPU
the collective may still run, and on CUDA it runs on a stream of its own, which the optimizer's
kernels do not wait for.

Every handle that a process group returns to Python is remembered until it is waited for, until it
says that it has completed, or until its future is taken, since others may wait for that. Waiting
for one collective counts for all that the same group was given before, because NCCL runs them one
after the other; a barrier waits for them on every backend. Collectives that C++ issues return no
handle to Python. They are not watched: DistributedDataParallel waits for its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

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


@dataclass(eq=False)
class Issued:
    """A collective at the moment when Python issues it.

    ``reduce_op``: such as ``SUM``; "" if it reduces nothing. ``ranks``: of its group. ``tensors``:
    what goes in; () afterwards. ``asynchronous``: a handle is returned to the caller. ``names``
    and ``call`` are the listener's own.
    """

    op: str
    reduce_op: str
    ranks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    asynchronous: bool
    names: tuple[str, ...] = ()
    call: int = -1


Listeners = tuple[Callable[[Issued, FrameType], object], Callable[[Issued], object]]
"""Told before a collective is issued, with the frame that issues it, and after somebody has waited
for it. Nothing keeps the frame, since it would keep alive what the step has freed."""

_listeners: Listeners | None = None
_issued: list[tuple[Any, Issued]] = []
"""The handles and collectives that a listener knows of and nobody has waited for."""

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


@contextmanager
def listening(
    issuing: Callable[[Issued, FrameType], object], waited: Callable[[Issued], object]
) -> Iterator[None]:
    """Inside the block, tell these functions of every collective that Python issues.

    What they raise is ignored. ``waited`` is also told of collectives whose caller got no handle.
    """
    global _listeners
    _listeners = issuing, waited
    try:
        yield
    finally:
        _listeners = None
        _issued.clear()


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
        issued = _tell_of(group, op, (*arguments, *named.values()))
        work = method(group, *arguments, **named)
        if issued is not None:
            _issued.append((work, issued))
        handles = _handles
        if handles is not None and work is not None:
            place = users_place(sys._getframe(1))
            handles.append(_Handle(work, id(group), op, (*arguments, *named.values()), place))
        return work

    return issuing


def _elements(arguments: tuple[Any, ...]) -> int:
    """The number of elements that go into a collective."""
    return sum(one.numel() for one in _inputs(arguments) if one.is_floating_point())


def _inputs(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The tensors that go into a collective: those of the last argument that has any."""
    for argument in reversed(arguments):
        tensors = [leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Tensor)]
        if tensors:
            return tuple(tensors)
    return ()


def _tell_of(group: Any, op: str, arguments: tuple[Any, ...]) -> Issued | None:
    """Tell the listener of a collective that is about to be issued; None without a listener."""
    if _listeners is None:
        return None
    try:
        frame = sys._getframe(2)
        issued = Issued(
            op=op,
            reduce_op=next(filter(None, map(_reduce_op, arguments)), ""),
            ranks=tuple(dist.get_process_group_ranks(group)),
            tensors=_inputs(arguments),
            asynchronous=bool(frame.f_locals.get("async_op", False)),
        )
        _listeners[0](issued, frame)
        issued.tensors = ()
    except Exception:  # a listener must not make the user's collective fail
        return None
    return issued


def _reduce_op(options: object) -> str:
    """The name of the operation in the options of a collective; "" if there is none."""
    operation = getattr(options, "reduceOp", None)
    if operation is None:
        return ""
    return str(getattr(operation, "op", operation)).rpartition(".")[2]


def _tell_of_wait(work: Any) -> None:
    """Tell the listener that this collective, and earlier ones, were waited for."""
    listeners = _listeners
    if listeners is None:
        return
    for number, (handle, issued) in enumerate(_issued):
        if handle is work:
            del _issued[number]
            try:
                listeners[1](issued)
            except Exception:
                return
            return


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
            _tell_of_wait(work)
        return answer

    kind.is_completed = is_completed


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which now takes the handle, and earlier ones of its group, off the list."""

    @wraps(method)
    @counts_as_torch
    def waiting(work: Any, *arguments: Any, **named: Any) -> Any:
        result = method(work, *arguments, **named)
        _waited_for(work)
        _tell_of_wait(work)
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
