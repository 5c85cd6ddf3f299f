"""The sums that say how far a gradient is from the true one, added up while its chunks pass."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.comparison.chunks import Chunk
from ddp_equivalence.comparison.gradients import hash_bytes

Truth = np.ndarray[tuple[int], np.dtype[np.float64 | np.float32]]
"""A flattened true gradient: in float64, or in float32 if it is large and ranks compute in that."""

IN_CACHE = 8192
"""So many elements are taken at a time on the CPU. Their sums are then made inside its cache, and
in memory that numpy takes again; larger parts would get new pages for every operation."""


@dataclass
class Sums:
    """The sums of one parameter on one rank, made by the process that has the measured gradient.

    Here m is the measured gradient and t the true one. ``difference``, ``measured``: sums of
    squares of m - t and of m. ``product``: the sum of m t. ``element``: the worst
    |m_i - t_i| / max(|t_i|, rms of t), at index ``place``. ``largest``: the largest |m_i - t_i|.
    ``seen``: how many elements have passed. ``zero``: True if all of them were zeros. ``bits``: a
    hash of the chunks that have passed, once they all have.
    """

    difference: float = 0.0
    measured: float = 0.0
    product: float = 0.0
    element: float = 0.0
    largest: float = 0.0
    place: int = 0
    seen: int = 0
    zero: bool = True
    bits: bytes = b""
    hashed: Any = field(default_factory=hashlib.sha256, repr=False, compare=False)

    def is_zero(self, shape: tuple[int, ...]) -> bool:
        """True if every element of this shape has passed, and was zero."""
        return self.zero and self.seen == math.prod(shape)

    @property
    def digest(self) -> bytes:
        """A hash of the chunks that have passed."""
        return self.bits or self.hashed.digest()

    def sent(self) -> Sums:
        """The same, as it can be sent to another process."""
        return replace(self, bits=self.digest, hashed=None)

    def take_chunk(self, chunk: Chunk, truth: Truth | None, rms: float) -> None:
        """Take in one chunk. ``truth``: the whole true gradient, flattened; None if there is none.
        ``rms``: the root of the mean of its squares.
        """
        part = slice(chunk.offset, chunk.offset + chunk.values.numel())
        self.take(chunk.offset, chunk.values, None if truth is None else truth[part], rms)

    def take(self, offset: int, flat: Tensor, right: Truth | None, rms: float) -> None:
        """Take in the elements from ``offset`` on, flattened. ``right``: the true ones; None if
        there are none. ``rms``: the root of the mean of the squares of the whole true gradient.
        """
        self.seen += flat.numel()
        self.hashed.update(offset.to_bytes(8, "little"))
        hash_bytes(self.hashed, flat.cpu())
        if right is None:
            self.zero = self.zero and not bool(flat.any())
            return
        if flat.numel() != right.size:
            return  # of another shape, which is said elsewhere
        if flat.device.type != "cpu":
            self._add(on_device(flat, right, rms), offset)
            return
        for begin in range(0, flat.numel(), IN_CACHE):
            part = slice(begin, begin + IN_CACHE)
            self._add(on_cpu(flat[part], right[part], rms), offset + begin)

    def _add(self, passed: Passed, offset: int) -> None:
        self.zero = self.zero and passed.zero
        self.difference += passed.difference
        self.measured += passed.measured
        self.product += passed.product
        self.largest = max(self.largest, not_nan(passed.largest))
        if (worst := not_nan(passed.element)) > self.element:
            self.element, self.place = worst, offset + passed.place


class Passed(NamedTuple):
    """The same sums of some elements, where ``place`` counts from their beginning."""

    difference: float
    measured: float
    product: float
    zero: bool
    largest: float = 0.0
    element: float = 0.0
    place: int = 0


def on_cpu(flat: Tensor, truth: Truth, rms: float) -> Passed:
    """In numpy: for small gradients, a call into torch costs more than the arithmetic."""
    values, truth = flat.double().numpy(), truth.astype(np.float64, copy=False)
    with np.errstate(all="ignore"):
        difference = values - truth
        square = float(values @ values)
        sums = Passed(
            float(difference @ difference),
            square,
            float(values @ truth),
            square == 0 and not values.any(),
        )
        if not difference.any():
            return sums
        scale = np.maximum(np.abs(truth), rms)
        np.abs(difference, out=difference)
        relative = difference / scale
        place = int(relative.argmax())  # the first NaN, if there is one
        return sums._replace(
            largest=float(difference.max()), element=float(relative[place]), place=place
        )


def on_device(flat: Tensor, truth: Truth, rms: float) -> Passed:
    """The same on the device where the chunk is."""
    values, right = flat.double(), torch.from_numpy(truth).to(flat.device).double()
    difference = values - right
    square = float(values @ values)
    sums = Passed(
        float(difference @ difference),
        square,
        float(values @ right),
        square == 0 and not bool(values.any()),
    )
    if not bool(difference.any()):
        return sums
    difference = difference.abs()
    relative = difference / right.abs().clamp(min=rms)
    place = int(relative.argmax())
    return sums._replace(
        largest=float(difference.max()), element=float(relative[place]), place=place
    )


def not_nan(value: float) -> float:
    """The value, or infinity for NaN."""
    return math.inf if math.isnan(value) else value


def norm_of(truth: Truth) -> float:
    """The norm, which is added up in float64."""
    squares, step = 0.0, truth.size if truth.dtype == np.float64 else IN_CACHE
    with np.errstate(all="ignore"):
        for begin in range(0, truth.size, max(1, step)):
            part = truth[begin : begin + step].astype(np.float64, copy=False)
            squares += float(part @ part)
    return math.sqrt(squares)
