"""Which collectives really ran, as torch's flight recorder saw them: op and elements.

The recorder is private in torch and differs by backend, so each rank proves at its start that it
shows a collective just issued; where it does not the answer is None and nothing is concluded from
it. gloo entries stay ``scheduled``; that they were issued is enough.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Where torch keeps its records: of gloo, and of NCCL where it is built in."""

_proved = False


@dataclass(frozen=True)
class Collective:
    """One collective as issued by one rank, such as ``all_reduce`` of 66 elements."""

    op: str
    elements: int


def prove_recorder(device: torch.device) -> None:
    """Issue one all-reduce, on all ranks, and see whether it is recorded."""
    global _proved
    before = len(_entries())
    dist.all_reduce(torch.zeros(1, device=device))
    _proved = len(_entries()) > before


class CollectiveLog:
    """Reads what was issued since the last look."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()

    def new(self) -> tuple[Collective, ...] | None:
        """The collectives since the last call, oldest first; None without a proved recorder."""
        if not _proved:
            return None
        entries = _entries()
        fresh = [entry for key, entry in entries.items() if key not in self._seen]
        self._seen = set(entries)
        return tuple(
            Collective(
                op=str(entry["profiling_name"]).split(":")[-1],
                elements=sum(math.prod(size) for size in entry["input_sizes"]),
            )
            for entry in fresh
        )


def _entries() -> dict[tuple[str, int], dict[str, Any]]:
    """Every record still held, oldest first, by its source and number."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for name in DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None:
            continue
        records = json.loads(dump() or "{}").get("entries", [])
        for record in sorted(records, key=lambda record: int(record["record_id"])):
            found[name, int(record["record_id"])] = record
    return found
