"""A hash of tensors: equal only if they are the same, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.comparison.gradients import dense

BLOCK = 1024

"""Words of 32 bits that are condensed into one of 64."""

CONDENSED_FROM = 2**16

"""Bytes from which on condensing first is faster than hashing all."""


@cache
def _multipliers() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(np.random.SeedSequence(0).generate_state(BLOCK, np.uint64), np.uint64)


def hash_bytes(found: hashlib._Hash, tensor: Tensor) -> None:
    """Add the bytes of a flat, contiguous tensor on the CPU to a hash.

    Large tensors are condensed first, by multilinear hashing (Lemire and Kaser, "Strongly universal
    string hashing is fast", 2014): four times faster than SHA-256, and other bits give the same
    hash only by a chance of 2^-32.
    """
    data = tensor.view(torch.uint8).numpy()
    if data.size >= CONDENSED_FROM:
        whole = data.size - data.size % (4 * BLOCK)
        words = data[:whole].view(np.uint32).reshape(-1, BLOCK)
        found.update(
            np.einsum("ij,j->i", words, _multipliers(), dtype=np.uint64, casting="unsafe").data
        )
        data = data[whole:]
    found.update(data.data)


def digest(tensors: Mapping[str, Tensor | None] | Iterator[tuple[str, Tensor | None]]) -> str:
    """A hash of names and bytes: equal if, and but for chance only if, bit for bit the same."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    found = hashlib.sha256()
    for name, tensor in items:
        found.update(name.encode())
        if tensor is not None and tensor.numel():
            hash_bytes(found, dense(tensor).reshape(-1).cpu().contiguous())
    return found.hexdigest()
