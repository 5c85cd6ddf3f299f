"""Which rows of the big batch was a model called with?"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_equivalence.measurement.observation import Indices

MOST_ROWS = 4096
"""Examples of a batch beyond which no ledger is kept."""


class Rows:
    """Finds the rows of the big batch in what a model is called with."""

    def __init__(self, batch: object) -> None:
        self._places: list[tuple[tuple[int, ...], torch.dtype, dict[bytes, list[int]]]] = []
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        # Those with most bytes a row first: labels are alike too often.
        for leaf in sorted(leaves, key=lambda one: -one[:1].numel() * one.element_size()):
            if not len(leaf) or len(leaf) > MOST_ROWS:
                continue
            places: dict[bytes, list[int]] = {}
            for index, row in enumerate(_bytes_of_rows(leaf)):
                places.setdefault(row, []).append(index)
            self._places.append((tuple(leaf.shape[1:]), leaf.dtype, places))

    def read(self, arguments: object) -> Indices | None:
        """The positions of the rows of the first argument whose rows are the batch's."""
        tensors = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
        for shape, dtype, places in self._places:
            for tensor in tensors:
                if tensor.ndim == 0 or tuple(tensor.shape[1:]) != shape or tensor.dtype != dtype:
                    continue
                found = [places.get(row) for row in _bytes_of_rows(tensor)]
                if all(found):
                    return _one_place_each([one for one in found if one])
        return None


def _bytes_of_rows(tensor: Tensor) -> list[bytes]:
    flat = tensor.detach().reshape(len(tensor), -1).cpu().contiguous()
    if not flat.shape[1]:
        return [b""] * len(flat)
    return [row.tobytes() for row in flat.view(torch.uint8).numpy()]


def _one_place_each(places: list[list[int]]) -> Indices:
    """Rows that are alike in the batch are taken in turn."""
    taken: dict[int, int] = {}
    found = []
    for options in places:
        turn = taken.get(options[0], 0)
        taken[options[0]] = turn + 1
        found.append(options[turn % len(options)])
    return tuple(found)
