"""A hash of tensors. Two hashes are equal only if the tensors are the same, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.comparison.gradients import dense

BLOCK = 1024
"""How many words of 32 bits are condensed into one word of 64 bits."""

CONDENSED_FROM = 2**16
"""Tensors of this many bytes or more are condensed before they are hashed, which is faster."""


@cache
def _multipliers() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(np.random.SeedSequence(0).generate_state(BLOCK, np.uint64), np.uint64)


def bytes_of(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a flat, contiguous tensor on the CPU, in the memory that it has.

    ``Tensor.numpy`` would make that memory impossible to resize from then on, and FSDP resizes the
    memory of the weights.
    """
    if tensor.numel() <= 1:  # it counts as contiguous whatever its stride is
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    data: Any = np.from_dlpack(tensor.view(torch.uint8))
    return cast(np.ndarray[tuple[int], np.dtype[np.uint8]], data)


def hash_bytes(hashed: hashlib._Hash, tensor: Tensor) -> None:
    """Add the bytes of a flat, contiguous tensor on the CPU to a hash.

    A large tensor is condensed first, by multilinear hashing (Lemire and Kaser, "Strongly universal
    string hashing is fast", 2014). That is four times faster than SHA-256, and different tensors
    get the same hash only with a probability of 2^-32.
    """
    data = bytes_of(tensor)
    if data.size >= CONDENSED_FROM:
        whole = data.size - data.size % (4 * BLOCK)
        words = data[:whole].view(np.uint32).reshape(-1, BLOCK)
        hashed.update(
            np.einsum("ij,j->i", words, _multipliers(), dtype=np.uint64, casting="unsafe").data
        )
        data = data[whole:]
    hashed.update(data.data)


def digest(tensors: Mapping[str, Tensor | None] | Iterator[tuple[str, Tensor | None]]) -> str:
    """A hash of names and bytes. Different tensors get the same hash only by chance."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    hashed = hashlib.sha256()
    for name, tensor in items:
        hashed.update(name.encode())
        if tensor is not None and tensor.numel():
            hash_bytes(hashed, dense(tensor).reshape(-1).cpu().contiguous())
    return hashed.hexdigest()
