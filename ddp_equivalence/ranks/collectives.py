"""The collectives of a rank: which it issued, which it waited for, and what torch's flight
recorder knows.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from operator import itemgetter
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_equivalence.ranks.users_line import counts_as_torch, users_place

# Reads from torch's flight recorder which collectives this rank has issued.
#
# The recorder is private in torch 2.13 and differs by backend. Each rank therefore issues one
# collective when it starts and checks that the recorder shows it. If it does not, the functions
# here return None, and the report draws no conclusion about collectives. An entry of gloo stays
# in the state ``scheduled``. It shows that the collective was issued, and nothing more is needed
# here.

DUMP_FUNCTIONS = ("_dump_fr_trace", "_dump_nccl_trace")
"""The functions of torch that return the records of gloo and, if it is built in, of NCCL."""

DEFAULT_GROUP = "default_pg"
"""Torch's name for the group of all ranks."""

FORGOTTEN = "forgotten"
"""Takes the place of an op for collectives that the recorder no longer holds."""


@dataclass(frozen=True)
class Collective:
    """One collective as one rank issued it, such as ``all_reduce`` of 66 elements.

    ``group``: torch's name for the group, "" for the group of all ranks. ``dtype``: of the first
    input.
    """

    op: str
    elements: int
    group: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class LastCollective:
    """The newest collective of one rank.

    ``number``: its number in ``group`` since the work began, from 1, or 0 if it is point-to-point
    communication, which has none. ``line``: the line outside
    torch that called it, "" if a thread of torch did. ``at``: seconds since the epoch.
    """

    number: int
    group: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    line: str
    at: float

    def __str__(self) -> str:
        shapes = f" of {', '.join(map(str, self.shapes))}" if self.shapes else ""
        dtypes = f" {'/'.join(sorted(set(self.dtypes)))}" if self.dtypes else ""
        group = "" if self.group in (DEFAULT_GROUP, "") else f" on group {self.group}"
        number = f" #{self.number}" if self.number else ""
        return f"{self.op}{number}{shapes}{dtypes}{group}"


_recorder_works = False

_newest_read: dict[str, int] = {}
"""Dump function -> the number of the newest record that ``new_collectives`` has returned."""

_issued_in_group: dict[str, int] = {}
"""Group -> the number of its collectives, as of the last call of ``new_collectives``."""

_sends: list[Collective] = []
"""The point-to-point sends since the last call of ``new_collectives``."""

_left_out: dict[str, set[int]] = {}
"""Dump function -> the numbers of the records that are the suite's own, and no step's."""


@contextmanager
def of_the_suite() -> Iterator[None]:
    """The block issues collectives that are the suite's own: no evidence of a step has them."""
    before = _newest_recorded()
    _blocks_here.count += 1
    try:
        with nobody_listening():
            yield
    finally:
        _blocks_here.count -= 1
        for function, newest in _newest_recorded().items():
            new = range(before.get(function, -1) + 1, newest + 1)
            _left_out.setdefault(function, set()).update(new)


class _Blocks(threading.local):
    count = 0


_blocks_here = _Blocks()
"""How many blocks of ``of_the_suite`` this thread is in. Simulated ranks are threads."""


def is_of_the_suite() -> bool:
    """True if what this thread issues is the suite's own."""
    return _blocks_here.count > 0


def _newest_recorded() -> dict[str, int]:
    """Dump function -> the number of its newest record."""
    dumps = {name: _entries(name, stacks=False) for name in DUMP_FUNCTIONS if _recorder_works}
    return {name: int(entries[-1]["record_id"]) for name, entries in dumps.items() if entries}


def check_recorder(device: torch.device) -> None:
    """Issue one all_reduce and note whether the recorder shows it. All ranks must call this."""
    global _recorder_works
    new_collectives()
    dist.all_reduce(torch.zeros(1, device=device))
    _recorder_works = True  # otherwise new_collectives would return None
    _recorder_works = bool(new_collectives())


def trust_recorder_that_has_entries() -> None:
    """Note whether the recorder works, in a process that must have issued collectives before."""
    global _recorder_works
    _recorder_works = any(_entries(function, stacks=False) for function in DUMP_FUNCTIONS)


def new_collectives() -> tuple[Collective, ...] | None:
    """The collectives since the last call, oldest first; None if the recorder does not work.

    The recorder holds only the newest ``TORCH_FR_BUFFER_SIZE`` collectives. If it has dropped n of
    those since the last call, the result contains ``Collective("forgotten", n)``.
    """
    collectives: list[Collective] = [*_sends]
    _sends.clear()
    for function in DUMP_FUNCTIONS:
        entries = _entries(function, stacks=False)
        if not entries:
            continue
        before = _newest_read.get(function, -1)
        new = [entry for entry in entries if entry["record_id"] > before]
        if new and (forgotten := new[0]["record_id"] - before - 1) > 0:
            collectives.append(Collective(FORGOTTEN, forgotten))
        _newest_read[function] = entries[-1]["record_id"]
        _issued_in_group.update({_group(e): _number(e) for e in new if not e.get("is_p2p")})
        ours = _left_out.pop(function, set())
        collectives += (_collective(entry) for entry in new if entry["record_id"] not in ours)
    return tuple(collectives) if _recorder_works else None


def issued_so_far() -> int | None:
    """The number of collectives that this process has issued since it started.

    None if the recorder does not work.
    """
    if not _recorder_works:
        return None
    dumps = [_entries(function, stacks=False) for function in DUMP_FUNCTIONS]
    return sum(int(entries[-1]["record_id"]) + 1 for entries in dumps if entries)


def issued_in_default_group() -> int | None:
    """The number of collectives that this rank has issued in the group of all ranks.

    Collectives since the last call of ``new_collectives`` are not counted. None if the recorder
    does not work.
    """
    return _issued_in_group.get(DEFAULT_GROUP, 0) if _recorder_works else None


def record_sends() -> None:
    """Record point-to-point sends from now on: torch 2.13 records them for NCCL only."""
    send = dist.ProcessGroup.send
    if hasattr(send, "__wrapped__"):
        return

    @wraps(send)
    @counts_as_torch
    def recorded(group: Any, tensors: Any, *arguments: Any, **keywords: Any) -> Any:
        _sends.append(Collective("send", sum(tensor.numel() for tensor in tensors)))
        return send(group, tensors, *arguments, **keywords)

    dist.ProcessGroup.send = recorded  # type: ignore[assignment]


def last_collective() -> LastCollective | None:
    """The newest collective of the current work, with the line that called it.

    None if nothing was recorded. The first call takes seconds, because torch then resolves the
    symbols of the stack. That does not matter on a rank that hangs.
    """
    newest: dict[str, Any] | None = None
    for function in DUMP_FUNCTIONS:
        entries = _entries(function, stacks=True) if _recorder_works else []
        # Skip collectives that were issued before the current work began.
        before = _newest_read.get(function, -1)
        entries = [entry for entry in entries if entry["record_id"] > before]
        if entries and (
            newest is None or entries[-1]["time_created_ns"] > newest["time_created_ns"]
        ):
            newest = entries[-1]
    if newest is None:
        return None
    return LastCollective(
        number=_number(newest) - _issued_in_group.get(_group(newest), 0),
        group=_group(newest),
        op=_op(newest),
        shapes=tuple(tuple(size) for size in newest["input_sizes"]),
        dtypes=tuple(map(str, newest["input_dtypes"])),
        line=_calling_line(newest.get("frames", [])),
        at=newest["time_created_ns"] / 1e9,
    )


def _entries(function: str, stacks: bool) -> list[dict[str, Any]]:
    """All entries that the recorder still holds, oldest first."""
    dump = getattr(torch._C._distributed_c10d, function, None)
    if dump is None:
        return []
    entries = pickle.loads(dump(includeStackTraces=stacks)).get("entries", [])
    return sorted(entries, key=itemgetter("record_id"))


def _collective(entry: dict[str, Any]) -> Collective:
    group, dtypes = _group(entry), entry["input_dtypes"]
    return Collective(
        op=_op(entry),
        elements=sum(map(math.prod, entry["input_sizes"])),
        group="" if group == DEFAULT_GROUP else group,
        dtype=str(dtypes[0]) if dtypes else "",
    )


def _number(entry: dict[str, Any]) -> int:
    return int(entry["collective_seq_id"] or entry["p2p_seq_id"])


def _group(entry: dict[str, Any]) -> str:
    *name, description = map(str, entry["process_group"])
    return description if description != "undefined" else "".join(name)


def _op(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).split(":")[-1]


def _calling_line(frames: list[dict[str, Any]]) -> str:
    """The innermost frame outside torch."""
    for frame in frames:
        if f"{os.sep}torch{os.sep}" not in frame["filename"]:
            summary = traceback.FrameSummary(frame["filename"], frame["line"], frame["name"])
            return f"{frame['filename']}:{frame['line']}: {summary.line}"
    return ""


# Tells a listener of every collective that Python issues, and when somebody has waited for it.


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
"""Told before a collective is issued, with the frame that issues it, and once its result is there
for the caller: after somebody has waited for it, or at once if there is no handle. Nothing keeps
the frame, since it would keep alive what the step has freed."""

_listeners: Listeners | None = None


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
        for handle in _handles:
            handle.issued = None
        _forget(())


@contextmanager
def nobody_listening() -> Iterator[None]:
    """Inside the block, no listener is told of any collective."""
    global _listeners
    listeners, _listeners = _listeners, None
    try:
        yield
    finally:
        _listeners = listeners


def inputs(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
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
            tensors=inputs(arguments),
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


def _tell_of_result(issued: Issued | None) -> None:
    """Tell the listener that what this collective leaves is in its tensors."""
    if _listeners is not None and issued is not None:
        with suppress(Exception):
            _listeners[1](issued)


# Sees which collectives a step has issued and never waited for.
#
# A collective that is called with ``async_op=True`` runs beside the program and returns a handle,
# torch's ``Work``. Its result must not be read before ``wait()`` was called on the handle: on the
# CPU the collective may still run, and on CUDA it runs on a stream of its own, which the
# optimizer's kernels do not wait for.
#
# Every handle that a process group returns to Python is remembered until it is waited for, until
# it says that it has completed, or until its future is taken, since others may wait for that.
# Waiting for one collective counts for all that the same group was given before, because NCCL
# runs them one after the other; a barrier waits for them on every backend. A synchronous
# collective of NCCL returns no handle since torch 2.8, because the group waits itself.
# Collectives that C++ issues return no handle to Python. They are not watched:
# DistributedDataParallel waits for its own.

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

    ``elements``: of all tensors of floating-point numbers that went in. ``place``: file, number and
    function of the line of the user's code that issued it; "" if no such line is known.
    """

    op: str
    elements: int
    place: tuple[str, int, str]

    def __str__(self) -> str:
        path, number, _ = self.place
        where = f" at {os.path.basename(path)}:{number}" if path else ""
        return f"{self.op} of {self.elements} elements{where}"


@dataclass(eq=False)
class _Handle:
    """A handle that nobody has waited for yet. ``group``: the id of its process group.

    ``arguments``: what the collective was given. ``issued``: what a listener was told of it.
    ``missed``: a step has issued it, and nothing else has waited for it yet.
    """

    work: Any
    group: int
    op: str
    arguments: tuple[Any, ...]
    place: tuple[str, int, str]
    issued: Issued | None
    missed: bool

    @property
    def collective(self) -> MissedWait:
        tensors = [one for one in inputs(self.arguments) if one.is_floating_point()]
        return MissedWait(self.op, sum(one.numel() for one in tensors), self.place)


_handles: list[_Handle] = []
"""The handles that a step or a listener waits for, in the order of their collectives."""

_of_a_step = False
"""True while a step runs whose missing waits are looked for."""


@contextmanager
def missed_waits(device: torch.device) -> Iterator[list[MissedWait]]:
    """The block runs a step; afterwards the list holds the collectives that it never waited for."""
    global _of_a_step
    missed: list[MissedWait] = []
    _forget()
    _of_a_step = True
    with ExitStack() as replaced:
        for owner, name in SYNCHRONISING if device.type == "cuda" else ():
            if function := getattr(owner, name, None):
                replaced.enter_context(patch.object(owner, name, _synchronising(function)))
        try:
            yield missed
        finally:
            missed += [handle.collective for handle in _handles if handle.missed]
            _of_a_step = False
            _forget()


def _forget(handles: Iterable[_Handle] | None = None) -> None:
    """These handles, or all, no longer count as missed; a listener may still wait for them."""
    for handle in list(_handles) if handles is None else handles:
        handle.missed = False
    _handles[:] = [handle for handle in _handles if handle.missed or handle.issued is not None]


def watch_handles() -> None:
    """Notice from now on the handles that process groups return."""
    for name, op in OPS.items():
        _wrap(dist.ProcessGroup, name, partial(_issuing, op=op))
    for name in WAITING:
        _wrap(dist.Work, name, _waiting)
    _wrap(dist.Work, "is_completed", _completing)


def _wrap(kind: Any, name: str, wrapped: Callable[[Callable[..., Any]], Any]) -> None:
    method = getattr(kind, name, None)
    if method is not None and not hasattr(method, "__wrapped__"):
        setattr(kind, name, wrapped(method))


def _issuing(method: Callable[..., Any], op: str) -> Callable[..., Any]:
    """The method, which now remembers the handle that it returns."""

    @wraps(method)
    @counts_as_torch
    def issuing(group: Any, *arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        issued = _tell_of(group, op, given)
        work = method(group, *arguments, **named)
        if work is None:
            _tell_of_result(issued)
        elif _of_a_step or issued is not None:
            place = users_place(sys._getframe(1))
            _handles.append(_Handle(work, id(group), op, given, place, issued, _of_a_step))
        return work

    return issuing


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, after which the handle, and earlier ones of its group, are waited for."""

    @wraps(method)
    @counts_as_torch
    def waiting(work: Any, *arguments: Any, **named: Any) -> Any:
        result = method(work, *arguments, **named)
        _waited_for(work)
        return result

    return waiting


def _completing(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, after which the handle is waited for if it says that it has completed."""

    @wraps(method)
    @counts_as_torch
    def is_completed(work: Any) -> bool:
        answer: bool = method(work)
        if answer:
            _waited_for(work)
        return answer

    return is_completed


def _waited_for(work: Any) -> None:
    for number, handle in enumerate(_handles):
        if handle.work is work:
            issued, handle.issued = handle.issued, None
            _forget([one for one in _handles[: number + 1] if one.group == handle.group])
            _tell_of_result(issued)
            return


def _synchronising(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after which all collectives that were issued before count as waited for."""

    @wraps(function)
    @counts_as_torch
    def synchronising(*arguments: Any, **named: Any) -> Any:
        before = list(_handles)
        result = function(*arguments, **named)
        _forget(before)
        return result

    return synchronising
