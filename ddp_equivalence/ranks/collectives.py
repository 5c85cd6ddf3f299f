"""Which collectives really ran, as torch's flight recorder saw them: op and elements.

The recorder is private in torch, so it is probed for; where it is missing the answer is None and
nothing is concluded from it. gloo entries stay ``scheduled``; that they were issued is enough.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """One collective as issued by one rank, such as ``all_reduce`` of 66 elements."""

    op: str
    elements: int


class CollectiveLog:
    """Reads what was issued since the last look."""

    def __init__(self) -> None:
        self._seen = -1

    def new(self) -> tuple[Collective, ...] | None:
        """The collectives since the last call, oldest first; None without a flight recorder."""
        entries = _entries()
        if entries is None:
            return None
        fresh = [entry for entry in entries if int(entry["record_id"]) > self._seen]
        self._seen = max((int(entry["record_id"]) for entry in entries), default=self._seen)
        return tuple(
            Collective(
                op=str(entry["profiling_name"]).split(":")[-1],
                elements=sum(math.prod(size) for size in entry["input_sizes"]),
            )
            for entry in fresh
        )


def _entries() -> list[dict[str, Any]] | None:
    try:
        from torch._C import _distributed_c10d as c10d

        dump = c10d._dump_fr_trace_json  # type: ignore[attr-defined]  # not in the stubs
        found: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    except Exception:
        return None
    return sorted(found, key=lambda entry: int(entry["record_id"]))
