"""Copies of tensors that a script may change or free afterwards."""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import Any

import psutil
import torch
from torch import Tensor

from ddp_equivalence.comparison.nudges import nudge_each
from ddp_equivalence.observed_scripts.rows import Rows
from ddp_equivalence.observed_scripts.rows_as_json import rows_without_tensors

LARGE = 1 << 20
"""The bytes from which on a copy may lie in a file. The system takes its memory back when it needs
it, so that the copies of a large model do not have to fit into the memory beside it."""

MOST_IN_MEMORY = min(1 << 30, psutil.virtual_memory().total // 64)
"""So many bytes of a process's large copies lie in memory, which takes half the time, before files
are used. Several processes share a machine."""

_in_memory = 0
"""The bytes of the large copies that are in memory now."""


def whole(tensor: Tensor, divided_by: float = 1.0) -> Tensor:
    """A copy on the CPU: dense, without a graph; of a sharded tensor, all of it."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    tensor = tensor if gather is None else gather()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    copy = kept(tensor)
    return copy if divided_by == 1.0 else copy.div_(divided_by)


def add_rows(tensors: dict[str, Tensor], lists: dict[str, Any], prefix: str, rows: Rows) -> None:
    """Add copies of rows, and how they lie in lists, to what will be written."""
    tensors |= {f"{prefix}/{path}": whole(tensor) for path, tensor in rows.all_tensors()}
    lists[f"{prefix}/"] = rows_without_tensors(rows)


def put(value: Tensor | None, into: Tensor, nudge: int = 0) -> None:
    """Give a tensor of a module this value, if that has its shape. ``nudge``: as in ``Query``."""
    if value is None:
        return
    if hasattr(into, "to_local"):  # sharded, here over one process
        into = into.to_local()
    if into.shape == value.shape:
        with torch.no_grad():
            into.data.copy_(value)
            if nudge:
                nudge_each([into.data], nudge)


def kept(tensor: Tensor) -> Tensor:
    """A copy of a dense tensor on the CPU; a large one may lie in a file without a name."""
    size = tensor.numel() * tensor.element_size()
    if size < LARGE:
        return tensor.to("cpu", copy=True)
    if _in_memory + size > MOST_IN_MEMORY and (copy := _in_a_file(tensor, size)) is not None:
        return copy
    copy = tensor.to("cpu", copy=True)
    _count(size)
    weakref.finalize(copy, _count, -size)
    return copy


def _count(size: int) -> None:
    global _in_memory
    _in_memory += size


def _in_a_file(tensor: Tensor, size: int) -> Tensor | None:
    """None if the disk has no room for it."""
    if not hasattr(os, "posix_fallocate"):
        return None
    descriptor, path = tempfile.mkstemp(prefix="observed-")
    try:
        # Without room on the disk, writing to the memory of the file would kill the process.
        os.posix_fallocate(descriptor, 0, size)
        flat = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except OSError:
        return None
    finally:
        os.close(descriptor)
        os.unlink(path)
    return flat.view(tensor.shape).copy_(tensor)
