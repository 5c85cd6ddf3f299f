"""Compare measured gradients with expected ones: by name, on every rank, as a stream of chunks.

Nothing here raises for a difference and nothing prints: the result is data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ddp_equivalence.case.errors import SuiteBug
from ddp_equivalence.case.steps import step_of
from ddp_equivalence.comparison.chunks import Chunk, chunks
from ddp_equivalence.comparison.digest import hash_bytes
from ddp_equivalence.comparison.gradients import Description, Gradients, dense, describe
from ddp_equivalence.comparison.tolerance import Limit, Noise, Tolerance

MOSTLY_ONE = 1.02
"""Over the square of the largest difference: what the squares of all add up to, if it is alone."""


@dataclass(frozen=True)
class RankError:
    """One parameter on one rank.

    ``error``: ||m - t|| / ||t||. ``element``: worst |m_i - t_i| / max(|t_i|, rms of t).
    ``place``: where in the parameter that is; ``alone``: nothing else is off. ``factor``: the k for
    which k t is nearest to m. ``unexplained``: ||m - k t|| / ||m||. ``ratio``: ||m|| / ||t||.
    """

    rank: int
    error: float
    element: float
    factor: float
    unexplained: float
    ratio: float
    within: bool
    place: tuple[int, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class ParameterComparison:
    """One parameter on all ranks, with the limit that it is held to."""

    name: str
    shape: tuple[int, ...]
    norm: float
    limit: Limit
    by_rank: tuple[RankError, ...]
    ranks_agree: bool

    @property
    def same(self) -> bool:
        return all(rank.within for rank in self.by_rank)

    @property
    def worst(self) -> RankError:
        return max(self.by_rank, key=lambda rank: (not rank.within, rank.error))

    @property
    def error(self) -> float:
        return self.worst.error


@dataclass(frozen=True)
class Comparison:
    """The result. ``structure`` lists, as sentences, names, shapes, dtypes and None that differ.

    ``same`` asks for agreement of the ranks to the last bit too: all that train together must
    leave a step with the same weights, or they drift apart.
    """

    parameters: tuple[ParameterComparison, ...]
    structure: tuple[str, ...]
    ranks: tuple[int, ...]
    elements: int

    @property
    def ranks_agree(self) -> bool:
        """True if every gradient is bit for bit the same on all ranks."""
        return all(parameter.ranks_agree for parameter in self.parameters)

    @property
    def same(self) -> bool:
        return self.ranks_agree and not self.structure and all(one.same for one in self.parameters)

    @property
    def differing(self) -> tuple[ParameterComparison, ...]:
        """The parameters beyond their limit, worst first; in the model's order where it is rounding
        that makes one worse than the other.
        """
        beyond = [one for one in self.parameters if not one.same]
        return tuple(sorted(beyond, key=lambda one: -float(f"{_excess(one):.6g}")))

    @property
    def worst(self) -> ParameterComparison | None:
        """The parameter nearest to its limit, or furthest beyond it."""
        return max(self.parameters, key=_excess, default=None)


def _excess(one: ParameterComparison) -> float:
    if one.limit.relative > 0 and math.isfinite(one.limit.relative):
        return one.error / one.limit.relative
    return math.inf if one.error > 0 else 0.0


def compare(
    expected: Gradients,
    measured: Mapping[int, Gradients],
    tolerance: Tolerance,
    noise: Mapping[str, Noise] | None = None,
) -> Comparison:
    """Compare the gradients of every rank, ``measured[rank][name]``, with the expected ones.

    ``expected`` is the truth in float64. Raises SuiteBug if both are the same memory: a reference
    compared with itself shows nothing.
    """
    described = {
        name: one and Description(one.shape, tolerance.dtype, one.layout)
        for name, one in describe(expected).items()
    }
    stream = Comparator(expected, described, tolerance)
    for rank, gradients in measured.items():
        for name, gradient in gradients.items():
            other = expected.get(name)
            if gradient is None or other is None or not gradient.numel():
                continue
            if gradient.is_sparse or other.is_sparse:
                continue
            if gradient.data_ptr() == other.data_ptr():
                raise SuiteBug(f"{name} of rank {rank} is the reference itself: same memory")
        stream.begin(rank, describe(gradients))
        for chunk in chunks(gradients):
            stream.add(rank, chunk)
    return stream.finish(noise or {})


@dataclass
class _Sums:
    """What is kept of one parameter on one rank while its chunks pass."""

    difference: float = 0.0
    measured: float = 0.0
    product: float = 0.0
    element: float = 0.0
    largest: float = 0.0
    place: int = 0
    seen: int = 0
    bits: hashlib._Hash = field(default_factory=hashlib.sha256)


class Comparator:
    """``begin`` each rank with what it has, ``add`` its chunks in any order, ``finish``.

    Holds the expected gradients once, and sums only of the measured ones.
    """

    def __init__(
        self,
        expected: Gradients,
        described: Mapping[str, Description | None],
        tolerance: Tolerance,
    ) -> None:
        self._expected = {
            name: None if value is None else dense(value).reshape(-1).numpy()
            for name, value in expected.items()
        }
        self._described = described
        self._norms = {
            name: float(np.linalg.norm(value))
            for name, value in self._expected.items()
            if value is not None
        }
        self._tolerances = {
            step: replace(tolerance, whole=math.sqrt(squares))
            for step, squares in _squares_by_step(self._norms).items()
        }
        self._ranks: dict[int, Mapping[str, Description | None]] = {}
        self._sums: dict[tuple[int, str], _Sums] = {}

    def begin(self, rank: int, described: Mapping[str, Description | None]) -> None:
        """Announce what the rank has; it need not send what is not expected of it."""
        self._ranks[rank] = described
        for name, one in described.items():
            expected = self._described.get(name)
            if one is not None and expected is not None and one.shape == expected.shape:
                self._sums[rank, name] = _Sums()

    def add(self, rank: int, chunk: Chunk) -> None:
        """Take in one chunk; values of parameters that are not expected are passed over."""
        sums = self._sums.get((rank, chunk.name))
        if sums is None:
            return
        sums.seen += chunk.values.numel()
        flat = chunk.values.detach().cpu().contiguous()
        sums.bits.update(chunk.offset.to_bytes(8, "little"))
        hash_bytes(sums.bits, flat)
        whole = self._expected.get(chunk.name)
        if whole is None or chunk.offset + flat.numel() > whole.size:
            return
        # In numpy: of small gradients the calls cost more than the arithmetic.
        truth = whole[chunk.offset : chunk.offset + flat.numel()]
        values = flat.double().numpy()
        with np.errstate(all="ignore"):
            difference = values - truth
            sums.difference += float(difference @ difference)
            sums.measured += float(values @ values)
            sums.product += float(values @ truth)
            if difference.any():
                rms = self._norms[chunk.name] / math.sqrt(whole.size)
                scale = np.maximum(np.abs(truth), rms)
                np.abs(difference, out=difference)
                sums.largest = max(sums.largest, _not_nan(float(difference.max())))
                off = difference / scale
                place = int(off.argmax())  # the first NaN, if there is one
                if (worst := _not_nan(float(off[place]))) > sums.element:
                    sums.element, sums.place = worst, chunk.offset + place

    def finish(self, noise: Mapping[str, Noise]) -> Comparison:
        """The comparison of all that was added; it may be asked for again with other ``noise``.

        Raises SuiteBug if announced chunks are missing.
        """
        for (rank, name), sums in self._sums.items():
            announced = self._ranks[rank][name]
            if announced is not None and sums.seen != math.prod(announced.shape):
                raise SuiteBug(f"{name} of rank {rank}: {sums.seen} elements of {announced} came")
        structure = tuple(line for rank in sorted(self._ranks) for line in self._structure_of(rank))
        parameters = tuple(self._parameter(name, noise.get(name, Noise())) for name in self._norms)
        compared = tuple(one for one in parameters if one.by_rank)
        return Comparison(
            parameters=compared,
            structure=structure,
            ranks=tuple(sorted(self._ranks)),
            elements=sum(math.prod(one.shape) for one in compared),
        )

    def _structure_of(self, rank: int) -> list[str]:
        found = self._ranks[rank]
        lines = []
        for name in self._described.keys() - found.keys():
            lines.append(f"rank {rank}: {name} is missing")
        for name in found.keys() - self._described.keys():
            lines.append(f"rank {rank}: {name} is not a parameter of the model")
        for name in self._described.keys() & found.keys():
            expected, measured = self._described[name], found[name]
            if expected != measured:
                lines.append(f"rank {rank}: {name} is {measured}, expected {expected}")
        return sorted(lines)

    def _parameter(self, name: str, noise: Noise) -> ParameterComparison:
        norm, described = self._norms[name], self._described[name]
        assert described is not None
        tolerance = self._tolerances[step_of(name)]
        limit = tolerance.limit(norm, noise, *_dtype_and_size(described))
        by_rank, bits = [], set()
        for rank, found in sorted(self._ranks.items()):
            one = found.get(name)
            if one is None or one.shape != described.shape:
                bits.add(b"absent" if one is None else b"other shape")
                continue
            sums = self._sums[rank, name]
            bits.add(sums.bits.digest())
            by_rank.append(_rank_error(rank, sums, norm, limit, _place(sums, described.shape)))
        return ParameterComparison(
            name, described.shape, norm, limit, tuple(by_rank), ranks_agree=len(bits) <= 1
        )


def _rank_error(
    rank: int, sums: _Sums, norm: float, limit: Limit, place: tuple[int, ...]
) -> RankError:
    distance, size = math.sqrt(_not_nan(sums.difference)), math.sqrt(_not_nan(sums.measured))
    factor = sums.product / norm**2 if norm**2 > 0 else math.nan
    rest = sums.measured - factor * sums.product if norm**2 > 0 else sums.measured
    return RankError(
        rank=rank,
        error=_over(distance, norm),
        element=sums.element,
        factor=factor,
        unexplained=_over(math.sqrt(max(0.0, _not_nan(rest))), size),
        ratio=_over(size, norm),
        within=distance <= limit.absolute and sums.element <= limit.element,
        place=place,
        alone=0 < sums.difference < MOSTLY_ONE * sums.largest**2,
    )


def _squares_by_step(norms: Mapping[str, float]) -> dict[str, float]:
    """Each step has a whole of its own: a large one must not hide what is wrong in a small one."""
    found: dict[str, float] = {}
    for name, norm in norms.items():
        found[step_of(name)] = found.get(step_of(name), 0.0) + norm**2
    return found


def _place(sums: _Sums, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(sums.place, shape))) if all(shape) else ()


def _dtype_and_size(described: Description | None) -> tuple[torch.dtype | None, int]:
    return (None, 1) if described is None else (described.dtype, math.prod(described.shape))


def _not_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _over(value: float, norm: float) -> float:
    if norm > 0:
        return value / norm
    return 0.0 if value == 0 else math.inf
