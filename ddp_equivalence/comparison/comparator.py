"""Compare measured gradients with expected ones: by name, on every rank, as a stream of chunks.

A difference raises no error, and nothing is printed: the result is data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ddp_equivalence.case.errors import SuiteBug
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.chunks import Chunk
from ddp_equivalence.comparison.comparison import Comparison, ParameterComparison, RankError
from ddp_equivalence.comparison.digest import hash_bytes
from ddp_equivalence.comparison.gradients import Description, Gradients, dense
from ddp_equivalence.comparison.structure import (
    Structure,
    Unlike,
    apart,
    differences,
    other_forms,
)
from ddp_equivalence.comparison.tolerance import Limit, Noise, Tolerance, relative_to

MOSTLY_ONE = 1.02
"""One element alone is off if the sum of all squared differences is less than this many times the
largest squared difference."""


@dataclass
class _Sums:
    """The sums that are kept of one parameter on one rank while its chunks pass.

    Here m is the measured gradient and t the true one. ``difference``, ``measured``: sums of
    squares of m - t and of m. ``product``: the sum of m t. ``element``: the worst
    |m_i - t_i| / max(|t_i|, rms of t), at index ``place``. ``largest``: the largest |m_i - t_i|.
    ``seen``: how many elements have passed. ``zero``: True if all of them were zeros. ``bits``: a
    hash of the chunks that have passed.
    """

    difference: float = 0.0
    measured: float = 0.0
    product: float = 0.0
    element: float = 0.0
    largest: float = 0.0
    place: int = 0
    seen: int = 0
    zero: bool = True
    bits: hashlib._Hash = field(default_factory=hashlib.sha256)

    def is_zero(self, shape: tuple[int, ...]) -> bool:
        """True if every element of this shape has passed, and was zero."""
        return self.zero and self.seen == math.prod(shape)


class Comparator:
    """Compares gradients as they arrive. It holds the expected ones, and sums of the measured ones.

    Call ``begin`` for every rank, ``add`` its chunks in any order, then ``finish``.
    """

    def __init__(
        self,
        expected: Gradients,
        described: Mapping[GradientKey, Description | None],
        tolerance: Tolerance,
    ) -> None:
        self._expected = {
            key: None if value is None else dense(value).reshape(-1).numpy()
            for key, value in expected.items()
        }
        self._described = described
        self._several_steps = len({step for step, _ in expected}) > 1
        self._norms = {
            key: math.sqrt(value.dot(value))
            for key, value in self._expected.items()
            if value is not None
        }
        # A norm can be zero because the squares of tiny numbers are.
        self._zeros = {
            key
            for key, norm in self._norms.items()
            if norm == 0 and not np.any(self._expected[key])
        }
        self._tolerance = tolerance
        self._ranks: dict[int, Mapping[GradientKey, Description | None]] = {}
        self._sums: dict[tuple[int, GradientKey], _Sums] = {}

    def begin(self, rank: int, described: Mapping[GradientKey, Description | None]) -> None:
        """Announce the gradients of a rank. Unexpected ones need not be added afterwards."""
        self._ranks[rank] = described
        for key in described.keys() & self._described.keys():
            description, expected = described[key], self._described[key]
            if description is not None and (
                expected is None or description.shape == expected.shape
            ):
                self._sums[rank, key] = _Sums()

    def add(self, rank: int, chunk: Chunk) -> None:
        """Take in one chunk. Chunks of parameters that are not expected are ignored."""
        sums = self._sums.get((rank, chunk.key))
        if sums is None:
            return
        flat = chunk.values
        sums.seen += flat.numel()
        sums.bits.update(chunk.offset.to_bytes(8, "little"))
        hash_bytes(sums.bits, flat)
        whole = self._expected.get(chunk.key)
        if whole is None:
            sums.zero = sums.zero and not bool(flat.any())
            return
        if chunk.offset + flat.numel() > whole.size:
            return
        # This is in numpy: for small gradients, a call into torch costs more than the arithmetic.
        truth = whole[chunk.offset : chunk.offset + flat.numel()]
        values = flat.double().numpy()
        with np.errstate(all="ignore"):
            difference = values - truth
            sums.difference += float(difference @ difference)
            square = float(values @ values)
            sums.zero = sums.zero and square == 0 and not values.any()
            sums.measured += square
            sums.product += float(values @ truth)
            if difference.any():
                rms = self._norms[chunk.key] / math.sqrt(whole.size)
                scale = np.maximum(np.abs(truth), rms)
                np.abs(difference, out=difference)
                sums.largest = max(sums.largest, _not_nan(float(difference.max())))
                relative = difference / scale
                place = int(relative.argmax())  # the first NaN, if there is one
                if (worst := _not_nan(float(relative[place]))) > sums.element:
                    sums.element, sums.place = worst, chunk.offset + place

    def finish(
        self,
        noise: Mapping[GradientKey, Noise],
        autocast: torch.dtype | None = None,
        tolerance: Tolerance | None = None,
    ) -> Comparison:
        """The comparison of all chunks added. The method may be called again with other ``noise``.

        ``autocast``: the dtype in which autocast let parts of the step compute, if it did.
        ``tolerance``: the one to apply, if it is not that of the constructor.

        Raises SuiteBug if announced chunks are missing.
        """
        for (rank, key), sums in self._sums.items():
            announced = self._ranks[rank][key]
            if self._described[key] is None or announced is None:
                continue
            if sums.seen != math.prod(announced.shape):
                raise SuiteBug(
                    f"{self._label(key)} of rank {rank} is {announced}, "
                    f"but {sums.seen} elements arrived"
                )
        unlike = tuple(self._unlike())
        tolerances = {
            step: replace(tolerance or self._tolerance, whole=math.sqrt(squares))
            for step, squares in _squares_by_step(self._norms).items()
        }
        parameters = [
            self._parameter(key, noise.get(key, Noise()), autocast, tolerances[key[0]])
            for key in self._norms
        ]
        compared = tuple(parameter for parameter in parameters if parameter.by_rank)
        forms = other_forms(unlike)
        of_some_ranks = dict(apart(forms, self._ranks))
        return Comparison(
            parameters=compared,
            structure=(*differences(unlike, self._label), *of_some_ranks.values()),
            ranks=tuple(sorted(self._ranks)),
            elements=sum(math.prod(parameter.shape) for parameter in compared),
            other_forms=tuple(form for form in forms if form not in of_some_ranks),
        )

    def _label(self, key: GradientKey) -> str:
        step, name = key
        return f"{name} (step {step + 1})" if self._several_steps else name

    def _unlike(self) -> Iterator[Unlike]:
        """The gradients whose structure is not the expected one."""
        for rank, measured in sorted(self._ranks.items()):
            for key, description in self._described.items():
                found = measured.get(key)
                if found != description or key not in measured:
                    sums = self._sums.get((rank, key))
                    zero = found is not None and sums is not None and sums.is_zero(found.shape)
                    expected = Structure(description, key in self._zeros)
                    yield Unlike(rank, key, Structure(found, zero, key in measured), expected)
            for key in measured.keys() - self._described.keys():
                yield Unlike(rank, key, Structure(measured[key]), expected=None)

    def _parameter(
        self,
        key: GradientKey,
        noise: Noise,
        autocast: torch.dtype | None,
        tolerance: Tolerance,
    ) -> ParameterComparison:
        norm, described = self._norms[key], self._described[key]
        assert described is not None
        dtypes = [described.dtype, *([] if autocast is None else [autocast])]
        dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        limit = tolerance.limit(norm, noise, dtype, math.prod(described.shape))
        by_rank, bits = [], set()
        for rank, measured in sorted(self._ranks.items()):
            description = measured.get(key)
            if description is None or description.shape != described.shape:
                absent = b"zeros" if key in self._zeros else b"absent"
                bits.add(absent if description is None else b"other shape")
                continue
            sums = self._sums[rank, key]
            bits.add(b"zeros" if sums.zero else sums.bits.digest())
            by_rank.append(_rank_error(rank, sums, norm, limit, _index(sums, described.shape)))
        return ParameterComparison(
            self._label(key),
            key,
            described.shape,
            norm,
            limit,
            tuple(by_rank),
            ranks_agree=len(bits) <= 1,
        )


def _rank_error(
    rank: int, sums: _Sums, norm: float, limit: Limit, place: tuple[int, ...]
) -> RankError:
    distance, size = math.sqrt(_not_nan(sums.difference)), math.sqrt(_not_nan(sums.measured))
    factor = sums.product / (norm * norm) if norm * norm > 0 else math.nan
    rest = sums.measured - factor * sums.product if norm * norm > 0 else sums.measured
    return RankError(
        rank=rank,
        distance=distance,
        error=relative_to(distance, norm),
        element=sums.element,
        factor=factor,
        unexplained=relative_to(math.sqrt(max(0.0, _not_nan(rest))), size),
        ratio=relative_to(size, norm),
        within=distance <= limit.absolute and sums.element <= limit.element,
        place=place,
        alone=0 < sums.difference < MOSTLY_ONE * sums.largest * sums.largest,
        bits=b"" if sums.zero else sums.bits.digest(),
    )


def _squares_by_step(norms: Mapping[GradientKey, float]) -> dict[int, float]:
    """The squared norm of all gradients of a step together.

    Every step has its own, so that large gradients in one step cannot hide a fault in another.
    """
    squares: dict[int, float] = {}
    for (step, _), norm in norms.items():
        squares[step] = squares.get(step, 0.0) + norm * norm
    return squares


def _index(sums: _Sums, shape: tuple[int, ...]) -> tuple[int, ...]:
    place, index = sums.place, []
    for size in reversed(shape) if all(shape) else ():
        place, last = divmod(place, size)
        index.append(last)
    return tuple(reversed(index))


def _not_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value
