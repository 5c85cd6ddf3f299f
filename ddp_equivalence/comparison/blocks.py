"""Parts of gradients that are sharded over ranks: where each lies in the whole, and who has it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ddp_equivalence.comparison.chunks import CHUNK_BYTES
from ddp_equivalence.comparison.sums import Sums, Truth


@dataclass(frozen=True)
class Block:
    """The part of a gradient on one rank: ``shape`` elements from ``begins`` on, of a ``whole`` of
    this shape. ``holders``: the ranks that have the whole together.
    """

    whole: tuple[int, ...]
    begins: tuple[int, ...]
    shape: tuple[int, ...]
    holders: tuple[int, ...]

    @property
    def inside(self) -> tuple[slice, ...]:
        """The index of the block in the whole."""
        return tuple(slice(a, a + n) for a, n in zip(self.begins, self.shape, strict=True))

    def place_in_whole(self, place: int) -> int:
        """The place of an element in the flattened whole, by that in the flattened block."""
        at = np.unravel_index(place, self.shape)
        moved = tuple(int(a) + begin for a, begin in zip(at, self.begins, strict=True))
        return int(np.ravel_multi_index(moved, self.whole))

    def places_of(self, sampled: range) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Which of these places in the flattened whole are in the block, by their numbers, and
        their places in the flattened block.
        """
        at = np.unravel_index(np.asarray(sampled, dtype=np.int64), self.whole)
        ends = (begin + size for begin, size in zip(self.begins, self.shape, strict=True))
        within = np.ones(len(sampled), dtype=bool)
        for axis, begin, end in zip(at, self.begins, ends, strict=True):
            within &= (axis >= begin) & (axis < end)
        own = tuple(axis[within] - begin for axis, begin in zip(at, self.begins, strict=True))
        return np.flatnonzero(within), np.ravel_multi_index(own, self.shape)

    def parts(self, local: Tensor, truth: Truth) -> Iterator[tuple[int, Tensor, Truth]]:
        """The flattened block in pieces: where each begins, its values, and the true ones."""
        right = truth.reshape(self.whole)[self.inside]
        rows = local.shape[0] if local.ndim else 0
        step = max(1, CHUNK_BYTES // max(1, local.element_size() * math.prod(self.shape[1:])))
        for begin in range(0, rows, step):
            values = local[begin : begin + step].reshape(-1).contiguous()
            flat = np.ascontiguousarray(right[begin : begin + step]).reshape(-1)
            yield begin * math.prod(self.shape[1:]), values, flat


def block_of(tensor: Any) -> Block | None:
    """The block that this rank has of a DTensor; None for any other tensor, and for a DTensor whose
    parts are no blocks or still have to be added up.
    """
    if not hasattr(tensor, "full_tensor"):
        return None
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = tensor.device_mesh, tensor.placements
    here = mesh.get_coordinate()
    if here is None or any(type(one) not in (Replicate, Shard) for one in placements):
        return None
    begins, shape = [0] * tensor.ndim, list(tensor.shape)
    index: list[int | slice] = []
    for axis, placement in enumerate(placements):
        if type(placement) is Replicate:
            index.append(here[axis])
            continue
        index.append(slice(None))
        # As torch.chunk cuts it: all parts have the same size, but for the last ones.
        dim, ranks = placement.dim, mesh.size(axis)
        each = -(-shape[dim] // ranks)
        begin = min(shape[dim], each * here[axis])
        begins[dim] += begin
        shape[dim] = min(each, shape[dim] - begin)
    holders = mesh.mesh[tuple(index)].flatten().tolist()
    return Block(tuple(tensor.shape), tuple(begins), tuple(shape), tuple(holders))


def of_the_whole(parts: Mapping[int, tuple[Block, Sums]]) -> Sums:
    """The sums of the whole gradient, from those of its blocks on the ranks that hold it."""
    distinct = {block.begins: (block, sums) for block, sums in parts.values() if sums.seen}
    ordered: Sequence[tuple[Block, Sums]] = [distinct[begins] for begins in sorted(distinct)]
    whole, hashed = Sums(), hashlib.sha256()
    for block, sums in ordered:
        whole.difference += sums.difference
        whole.measured += sums.measured
        whole.product += sums.product
        whole.largest = max(whole.largest, sums.largest)
        whole.seen += sums.seen
        whole.zero = whole.zero and sums.zero
        hashed.update(repr(block.begins).encode() + sums.digest)
        if sums.element > whole.element:
            whole.element, whole.place = sums.element, block.place_in_whole(sums.place)
    whole.bits = hashed.digest()
    return whole
