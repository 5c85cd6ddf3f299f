"""Recognises the examples of the big batch in the tensors that a model is called with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.case.batch import BatchDims, dim_of, entries_by_example
from ddp_equivalence.case.batch_tree import leaves_of, tensors_of
from ddp_equivalence.measurement.observation import Indices

MOST_EXAMPLES = 4096
"""Examples are not looked up in a larger batch."""


class ExampleLookup:
    """Finds the positions, in the big batch, of the rows that a model is called with."""

    def __init__(self, batch: object, dims: BatchDims = None) -> None:
        self._rows: list[_Rows] = []
        leaves = [
            (leaf.detach().movedim(dim, 0), dim)
            for path, leaf in leaves_of(batch, entries_by_example(dims))
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
            if (dim := dim_of(path, leaf, None if callable(dims) else dims)) is not None
            if leaf.ndim > dim
        ]
        # The leaf with the largest rows comes first: small rows, such as labels, are often alike.
        for leaf, dim in sorted(leaves, key=_minus_bytes_of_a_row):
            if not leaf.numel() or len(leaf) > MOST_EXAMPLES:
                continue
            positions: dict[bytes, list[int]] = {}
            for index, row in enumerate(_bytes_of_rows(leaf)):
                positions.setdefault(row, []).append(index)
            self._rows.append(_Rows(dim, tuple(leaf.shape[1:]), leaf.dtype, positions))

    def positions_of(self, arguments: object) -> Indices | None:
        """Find a tensor with nothing but rows of the batch; return their positions, or None."""
        try:
            tensors = [one for one in tensors_of(arguments) if one.layout is torch.strided]
        except Exception:  # any object may be an argument, also one that holds itself
            return None
        for rows in self._rows:
            for tensor in tensors:
                # A loss may turn a tensor over before the model is called with it.
                for dim in sorted({rows.dim, 0}, reverse=True):
                    if (found := rows.positions_in(tensor, dim)) is not None:
                        return found
        return None


@dataclass(frozen=True)
class _Rows:
    """The rows of one leaf: the dim of its examples, the shape and dtype of one of them, and bytes
    -> the positions of the examples that have these bytes.
    """

    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    positions: Mapping[bytes, list[int]]

    def positions_in(self, tensor: Tensor, dim: int) -> Indices | None:
        """The positions of the examples along this dim; None if it holds something else."""
        if tensor.is_nested or tensor.ndim <= dim or tensor.dtype != self.dtype:
            return None
        examples_first = tensor.detach().movedim(dim, 0)
        if tuple(examples_first.shape[1:]) != self.shape:
            return None
        candidates = [self.positions.get(row) for row in _bytes_of_rows(examples_first)]
        return _one_position_each([one for one in candidates if one]) if all(candidates) else None


def _minus_bytes_of_a_row(leaf_and_dim: tuple[Tensor, int]) -> int:
    leaf, _ = leaf_and_dim
    return -leaf[:1].numel() * leaf.element_size()


def _bytes_of_rows(tensor: Tensor) -> list[bytes]:
    flat = tensor.reshape(len(tensor), math.prod(tensor.shape[1:])).cpu().contiguous()
    if not flat.shape[1]:
        return [b""] * len(flat)
    return [row.tobytes() for row in flat.view(torch.uint8).numpy()]


def _one_position_each(candidates: list[list[int]]) -> Indices:
    """One position for every row. If the batch has equal examples, equal rows get them in turn."""
    times_taken: Counter[int] = Counter()
    chosen = []
    for positions in candidates:
        turn = times_taken[positions[0]]
        times_taken[positions[0]] += 1
        chosen.append(positions[turn % len(positions)])
    return tuple(chosen)
