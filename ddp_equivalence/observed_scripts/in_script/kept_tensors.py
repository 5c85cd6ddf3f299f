"""Copies of tensors that a script may change or free afterwards."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import Tensor

LARGE = 1 << 20
"""The bytes from which on a copy lies in a file. The system takes its memory back when it needs it,
so that the copies of a large model do not have to fit into the memory beside it."""


def whole(tensor: Tensor, divided_by: float = 1.0) -> Tensor:
    """A copy on the CPU: dense, without a graph; of a sharded tensor, all of it."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    tensor = tensor if gather is None else gather()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    copy = kept(tensor)
    return copy if divided_by == 1.0 else copy.div_(divided_by)


def kept(tensor: Tensor) -> Tensor:
    """A copy of a dense tensor on the CPU; a large one lies in a file that has no name any more."""
    size = tensor.numel() * tensor.element_size()
    if size >= LARGE and hasattr(os, "posix_fallocate"):
        descriptor, path = tempfile.mkstemp(prefix="observed-")
        try:
            # Without room on the disk, writing to the memory of the file would kill the process.
            os.posix_fallocate(descriptor, 0, size)
            flat = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        except OSError:
            return tensor.to("cpu", copy=True)
        finally:
            os.close(descriptor)
            os.unlink(path)
        return flat.view(tensor.shape).copy_(tensor)
    return tensor.to("cpu", copy=True)
