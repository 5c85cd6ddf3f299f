"""Reads from torch's flight recorder which collectives this rank has issued.

The recorder is private in torch 2.13 and differs by backend. Each rank therefore issues one
collective when it starts and checks that the recorder shows it. If it does not, the functions here
return None, and the report draws no conclusion about collectives. An entry of gloo stays in the
state ``scheduled``. It shows that the collective was issued, and nothing more is needed here.
"""

from __future__ import annotations

import math
import os
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.ranks.issued_collectives import nobody_listening
from ddp_equivalence.ranks.torch_frames import counts_as_torch

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

    ``number``: its number in ``group`` since the work began, from 1. ``line``: the line outside
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
        return f"{self.op} #{self.number}{shapes}{dtypes}{group}"


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
    try:
        with nobody_listening():
            yield
    finally:
        for function, newest in _newest_recorded().items():
            new = range(before.get(function, -1) + 1, newest + 1)
            _left_out.setdefault(function, set()).update(new)


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
