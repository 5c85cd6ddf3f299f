"""Rows without their tensors, which lie in a file of their own, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ddp_equivalence.observed_scripts.listed_rows import Entry
from ddp_equivalence.observed_scripts.rows import PLAIN, Rows

NO_ROWS: Mapping[str, Any] = {"count": 0, "lists": {}, "entries": {}}

IS_TENSOR = {"is": "tensor"}
"""Stands for a tensor in the entry of a row."""


def rows_without_tensors(rows: Rows) -> dict[str, Any]:
    """What JSON can hold. Leaves that it cannot hold are left out."""
    return {
        "count": rows.count,
        "lists": dict(rows.lists),
        "entries": {
            path: [_without_tensors(entry) for entry in entries]
            for path, entries in rows.entries.items()
        },
    }


def rows_with_tensors(known: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Rows:
    """What ``rows_without_tensors`` made, with the tensors by their paths in the batch."""
    others = dict(tensors)
    entries: dict[str, list[Entry]] = {
        path: [
            {
                end: others.pop(f"{path}[{number}]{end}") if leaf == IS_TENSOR else leaf
                for end, leaf in entry.items()
            }
            for number, entry in enumerate(of_path)
        ]
        for path, of_path in known["entries"].items()
    }
    return Rows(others, known["lists"], known["count"], entries)


def _without_tensors(entry: Entry) -> dict[str, Any]:
    return {
        end: IS_TENSOR if isinstance(leaf, Tensor) else leaf
        for end, leaf in entry.items()
        if isinstance(leaf, Tensor) or type(leaf) in PLAIN
    }
