"""Gradients in chunks, so that no process holds a second copy of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.gradients import Gradients, dense

CHUNK_BYTES = 16 * 2**20
"""The largest size of a chunk."""


@dataclass(frozen=True)
class Chunk:
    """Elements ``offset`` to ``offset + values.numel()`` of one flattened gradient.

    ``values``: they are contiguous, and have no graph.
    """

    key: GradientKey
    offset: int
    values: Tensor


@dataclass(frozen=True)
class RawChunk:
    """A chunk on its way between processes: as bytes, since numpy has no bfloat16."""

    key: GradientKey
    offset: int
    dtype: torch.dtype
    data: np.ndarray[tuple[int], np.dtype[np.uint8]]

    def open(self) -> Chunk:
        return Chunk(self.key, self.offset, torch.from_numpy(self.data).view(self.dtype))


def chunks(gradients: Gradients) -> Iterator[Chunk]:
    """All gradients, flattened and cut into chunks, on the devices where they are. An empty
    gradient has no chunk.
    """
    for key, gradient in gradients.items():
        if gradient is None:
            continue
        flat = dense(gradient).reshape(-1)
        size = max(1, CHUNK_BYTES // flat.element_size())
        for offset in range(0, flat.numel(), size):
            yield Chunk(key, offset, flat[offset : offset + size].contiguous())


def raw_messages(gradients: Gradients) -> Iterator[list[RawChunk]]:
    """All gradients as messages of at most CHUNK_BYTES, in which small chunks travel together."""
    message: list[RawChunk] = []
    size = 0
    for chunk in chunks(gradients):
        data = chunk.values.cpu().view(torch.uint8).numpy()
        if message and size + data.nbytes > CHUNK_BYTES:
            yield message
            message, size = [], 0
        message.append(RawChunk(chunk.key, chunk.offset, chunk.values.dtype, data))
        size += data.nbytes
    if message:
        yield message
