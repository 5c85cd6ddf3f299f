"""Recognises the examples of the big batch in the tensors that a model is called with."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_equivalence.measurement.observation import Indices

MOST_EXAMPLES = 4096
"""Examples are not looked up in a larger batch."""


class ExampleLookup:
    """Finds the positions, in the big batch, of the rows that a model is called with."""

    def __init__(self, batch: object) -> None:
        self._positions: list[tuple[tuple[int, ...], torch.dtype, dict[bytes, list[int]]]] = []
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        # The leaf with the largest rows comes first: small rows, such as labels, are often alike.
        for leaf in sorted(leaves, key=lambda leaf: -leaf[:1].numel() * leaf.element_size()):
            if not len(leaf) or len(leaf) > MOST_EXAMPLES:
                continue
            positions: dict[bytes, list[int]] = {}
            for index, row in enumerate(_bytes_of_rows(leaf)):
                positions.setdefault(row, []).append(index)
            self._positions.append((tuple(leaf.shape[1:]), leaf.dtype, positions))

    def positions_of(self, arguments: object) -> Indices | None:
        """Find a tensor with nothing but rows of the batch; return their positions, or None."""
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        for shape, dtype, positions in self._positions:
            for tensor in tensors:
                if tensor.ndim == 0 or tuple(tensor.shape[1:]) != shape or tensor.dtype != dtype:
                    continue
                candidates = [positions.get(row) for row in _bytes_of_rows(tensor)]
                if all(candidates):
                    return _one_position_each([places for places in candidates if places])
        return None


def _bytes_of_rows(tensor: Tensor) -> list[bytes]:
    flat = tensor.detach().reshape(len(tensor), -1).cpu().contiguous()
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
