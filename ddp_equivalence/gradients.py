"""Gradients by parameter name, and the few operations that comparing them needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

Gradients = Mapping[str, Tensor | None]
"""Parameter name -> gradient, or None where backward left none."""

CHUNK_BYTES = 16 * 2**20
"""Gradients travel in chunks of at most this size, so that no side holds a second copy."""


@dataclass(frozen=True)
class Description:
    """What a gradient is, without its values; ``layout`` is ``strided`` or ``sparse_coo``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "strided"

    def __str__(self) -> str:
        layout = "" if self.layout == "strided" else f", {self.layout}"
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}{layout}"


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


@dataclass(frozen=True)
class Selection:
    """Which elements of flattened gradients are kept: every ``stride[name]``-th, from the first.

    Sums of gradients are sums in every element, so whatever mixes them shows in a selection too.
    """

    sizes: Mapping[str, int]
    stride: Mapping[str, int]

    @classmethod
    def at_most(cls, elements: int, sizes: Mapping[str, int]) -> Selection:
        """All of them if they are few enough, else about equally many of each parameter."""
        if sum(sizes.values()) <= elements:
            return cls(sizes, dict.fromkeys(sizes, 1))
        each = max(1, elements // len(sizes))
        # Odd, so that the columns of a matrix are met in turn.
        return cls(sizes, {name: -(-size // each) | 1 for name, size in sizes.items()})

    def only(self, names: Sequence[str]) -> Selection:
        """The same of these parameters alone."""
        return Selection(
            {name: self.sizes[name] for name in names}, {name: self.stride[name] for name in names}
        )

    @property
    def is_whole(self) -> bool:
        return all(stride == 1 for stride in self.stride.values())

    def size(self, name: str) -> int:
        """How many elements of this parameter are kept."""
        return len(range(0, self.sizes[name], self.stride[name]))

    def of_chunk(self, chunk: Chunk) -> Tensor:
        """What is kept of a chunk, as a copy."""
        first = -chunk.offset % self.stride[chunk.name]
        return chunk.values[first :: self.stride[chunk.name]].clone()

    def of_one(self, name: str, gradient: Tensor) -> Tensor:
        """What is kept of one gradient, as float64 on the CPU, in memory of its own."""
        flat = dense(gradient).reshape(-1)[:: self.stride[name]]
        return flat.to("cpu", torch.float64, copy=True)

    def of(self, gradients: Gradients) -> Tensor:
        """What is kept of all as one vector; None counts as zero."""
        return self.joined(
            {name: self.of_one(name, one) for name, one in gradients.items() if one is not None}
        )

    def joined(self, kept: Mapping[str, Tensor]) -> Tensor:
        """What was kept of each as one float64 vector; zeros for what is missing."""
        zeros = {name: self.size(name) for name in self.sizes if name not in kept}
        return torch.cat(
            [
                torch.zeros(zeros[name], dtype=torch.float64)
                if name in zeros
                else kept[name].double()
                for name in self.sizes
            ]
        )


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradient of every parameter, shared parameters once, under their first name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def updates_of(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Weights now minus ``before``; None for parameters that require no gradient."""
    return {
        name: parameter.detach() - before[name] if parameter.requires_grad else None
        for name, parameter in model.named_parameters()
    }


def sgd_step(model: nn.Module, lr: float) -> None:
    """Plain SGD: no momentum, no decay, nothing that hides a factor."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-lr)


def dense(gradient: Tensor) -> Tensor:
    """Detached, and dense if it was sparse."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def describe(gradients: Gradients) -> dict[str, Description | None]:
    """The description of every gradient, None where there is none."""
    return {
        name: None
        if gradient is None
        else Description(
            tuple(gradient.shape), gradient.dtype, str(gradient.layout).removeprefix("torch.")
        )
        for name, gradient in gradients.items()
    }


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
