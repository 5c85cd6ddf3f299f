"""Gradients travel between processes in chunks, so that no side holds a second copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.comparison.gradients import Gradients, dense

CHUNK_BYTES = 16 * 2**20

"""Gradients travel in chunks of at most this size, so that no side holds a second copy."""


@dataclass(frozen=True)
class Chunk:
    """Elements ``offset`` to ``offset + values.numel()`` of one flattened gradient."""

    name: str
    offset: int
    values: Tensor


@dataclass(frozen=True)
class RawChunk:
    """A chunk as bytes on its way between processes; numpy has no bfloat16, so bytes it is."""

    name: str
    offset: int
    dtype: torch.dtype
    data: np.ndarray[tuple[int], np.dtype[np.uint8]]

    def open(self) -> Chunk:
        return Chunk(self.name, self.offset, torch.from_numpy(self.data).view(self.dtype))


def chunks(gradients: Gradients) -> Iterator[Chunk]:
    """All values, flattened, in pieces of at most CHUNK_BYTES; empty gradients have no chunk."""
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        flat = dense(gradient).reshape(-1)
        size = max(1, CHUNK_BYTES // flat.element_size())
        for offset in range(0, flat.numel(), size):
            yield Chunk(name, offset, flat[offset : offset + size])


def raw_messages(gradients: Gradients) -> Iterator[list[RawChunk]]:
    """The chunks as bytes on the CPU, small ones together, CHUNK_BYTES a message at the most."""
    message: list[RawChunk] = []
    size = 0
    for chunk in chunks(gradients):
        data = chunk.values.cpu().contiguous().view(torch.uint8).numpy()
        if message and size + data.nbytes > CHUNK_BYTES:
            yield message
            message, size = [], 0
        message.append(RawChunk(chunk.name, chunk.offset, chunk.values.dtype, data))
        size += data.nbytes
    if message:
        yield message
