"""A hash of the rows of tensors that is the same in whatever order and in however many calls."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MIXING = np.uint64(0x9E3779B97F4A7C15)
"""An odd number whose bits are irregular: 2^64 divided by the golden ratio."""


class UnorderedRows:
    """Adds up hashes of rows, one sum for each place in the arguments and each shape of a row."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, tuple[int, ...], str], int] = {}

    def add(self, tensors: list[Tensor]) -> None:
        """Add the rows of all these tensors, the arguments of one call."""
        for place, tensor in enumerate(tensors):
            rows = tensor if tensor.ndim else tensor.reshape(1)
            key = place, tuple(rows.shape[1:]), str(rows.dtype)
            self._sums[key] = (self._sums.get(key, 0) + int(row_hashes(rows).sum())) % 2**64

    def __str__(self) -> str:
        return " ".join(f"{key}: {value}" for key, value in sorted(self._sums.items()))


def row_hashes(rows: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """A hash of every row, by multilinear hashing of its 8-byte words."""
    if not rows.numel():
        return np.ones(len(rows), dtype=np.uint64)
    flat = rows.detach().cpu().reshape(len(rows), -1).contiguous().view(torch.uint8).numpy()
    missing = -flat.shape[1] % 8
    words = np.pad(flat, ((0, 0), (0, missing))).view(np.uint64)
    factors = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * MIXING | np.uint64(1)
    with np.errstate(over="ignore"):
        hashes = (words * factors).sum(axis=1, dtype=np.uint64)
        hashes = (hashes ^ (hashes >> np.uint64(29))) * MIXING
        hashes ^= hashes >> np.uint64(32)
        mixed: np.ndarray[tuple[int], np.dtype[np.uint64]] = hashes * MIXING
    return mixed
