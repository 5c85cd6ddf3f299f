"""Which collectives really ran, as torch's flight recorder saw them.

The recorder is private in torch and differs by backend, so each rank proves at its start that it
shows a collective just issued; where it does not the answer is None and nothing is concluded from
it. gloo entries stay ``scheduled``; that they were issued is enough.
"""

from __future__ import annotations

import math
import os
import pickle
import traceback
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Where torch keeps its records: of gloo, and of NCCL where it is built in."""


@dataclass(frozen=True)
class Collective:
    """One collective as issued by one rank, such as ``all_reduce`` of 66 elements.

    ``group``: torch's name for it, "" for the group of all ranks. ``dtype``: of its first input.
    """

    op: str
    elements: int
    group: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class LastCollective:
    """The newest collective of one rank: ``number`` in ``group`` since the work began (from 1).

    ``line``: where the rank called it, outside torch; "" if it came from a thread of torch's own.
    ``at``: seconds since the epoch.
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
        kind = f" {'/'.join(sorted(set(self.dtypes)))}" if self.dtypes else ""
        group = "" if self.group in (ALL, "") else f" on group {self.group}"
        return f"{self.op} #{self.number}{shapes}{kind}{group}"


_proved = False
_newest: dict[str, int] = {}
"""Of each recorder: the number of the newest record that was already looked at."""

_issued: dict[str, int] = {}
"""Of each group: how many collectives it had seen by then."""


def prove_recorder(device: torch.device) -> None:
    """Issue one all-reduce, on all ranks, and see whether it is recorded."""
    global _proved
    new_collectives()
    dist.all_reduce(torch.zeros(1, device=device))
    _proved = True
    _proved = bool(new_collectives())


def new_collectives() -> tuple[Collective, ...] | None:
    """The collectives since the last call, oldest first; None without a proved recorder.

    The recorder holds the newest ``TORCH_FR_BUFFER_SIZE``; of those forgotten since the last call
    a ``Collective("forgotten", n)`` tells how many there were.
    """
    found: list[Collective] = [*_sent]
    _sent.clear()
    for name in DUMPS:
        entries = _entries(name, stacks=False)
        if not entries:
            continue
        before = _newest.get(name, -1)
        new = [one for one in entries if one["record_id"] > before]
        if new and (forgotten := new[0]["record_id"] - before - 1) > 0:
            found.append(Collective(FORGOTTEN, forgotten))
        _newest[name] = entries[-1]["record_id"]
        _issued.update({_group(one): _number(one) for one in entries if not one.get("is_p2p")})
        found += map(_collective, new)
    return tuple(found) if _proved else None


def _collective(entry: dict[str, Any]) -> Collective:
    group, dtypes = _group(entry), entry["input_dtypes"]
    return Collective(
        op=_op(entry),
        elements=sum(map(math.prod, entry["input_sizes"])),
        group="" if group == ALL else group,
        dtype=str(dtypes[0]) if dtypes else "",
    )


def issued_so_far() -> int | None:
    """How many collectives this process has issued in its life; None without a proved recorder."""
    if not _proved:
        return None
    entries = [_entries(name, stacks=False) for name in DUMPS]
    return sum(int(found[-1]["record_id"]) + 1 for found in entries if found)


def record_sent() -> None:
    """Write down what is sent from rank to rank: torch's recorder has that of NCCL only."""
    send = dist.ProcessGroup.send
    if hasattr(send, "__wrapped__"):
        return

    @wraps(send)
    def recorded(group: Any, tensors: Any, *more: Any, **named: Any) -> Any:
        _sent.append(Collective("send", sum(tensor.numel() for tensor in tensors)))
        return send(group, tensors, *more, **named)

    dist.ProcessGroup.send = recorded  # type: ignore[assignment]


_sent: list[Collective] = []

FORGOTTEN = "forgotten"
"""Not an op: how many collectives the recorder no longer held."""


def issued_by_all() -> int | None:
    """How many collectives of the group of all ranks this rank has issued; None if not recorded.

    As of the last call of ``new_collectives``.
    """
    return _issued.get(ALL, 0) if _proved else None


ALL = "default_pg"
"""What torch calls the group of all ranks."""


def last_collective() -> LastCollective | None:
    """The newest one of this process, with the line that called it; None if nothing is recorded.

    Symbolizing the stack takes seconds the first time: for a rank that hangs anyway.
    """
    newest: dict[str, Any] | None = None
    for name in DUMPS:
        entries = _entries(name, stacks=True) if _proved else []
        # What was issued before this work began says nothing about it.
        entries = [one for one in entries if one["record_id"] > _newest.get(name, -1)]
        if entries and (
            newest is None or entries[-1]["time_created_ns"] > newest["time_created_ns"]
        ):
            newest = entries[-1]
    if newest is None:
        return None
    return LastCollective(
        number=_number(newest) - _issued.get(_group(newest), 0),
        group=_group(newest),
        op=_op(newest),
        shapes=tuple(tuple(size) for size in newest["input_sizes"]),
        dtypes=tuple(map(str, newest["input_dtypes"])),
        line=_calling_line(newest.get("frames", [])),
        at=newest["time_created_ns"] / 1e9,
    )


def _entries(name: str, stacks: bool) -> list[dict[str, Any]]:
    """Every record still held, oldest first."""
    dump = getattr(torch._C._distributed_c10d, name, None)
    if dump is None:
        return []
    entries = pickle.loads(dump(includeStackTraces=stacks)).get("entries", [])
    return sorted(entries, key=lambda one: int(one["record_id"]))


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
