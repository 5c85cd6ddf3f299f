"""Compares measured gradients with expected ones, by name, on every rank, as a stream of chunks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.case.errors import SuiteBug
from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.chunks import Chunk, chunks
from ddp_equivalence.comparison.digits import in_order
from ddp_equivalence.comparison.gradients import (
    Description,
    Gradients,
    dense,
    describe,
    in_first_step,
)
from ddp_equivalence.comparison.shared import ComparedHere, sums_of
from ddp_equivalence.comparison.sums import Sums, norm_of, not_nan
from ddp_equivalence.comparison.tolerance import Limit, Noise, Tolerance, relative_to

# The result of a comparison, as frozen data: errors and limits by parameter and rank.

DIGITS = 32
"""So many hexadecimal digits of a digest are kept."""

LARGE = 2_000_000
"""The big batch of a model with so many elements takes long, and measuring its rounding longer."""

NARROW = 1e-3
"""A limit up to this tells multiples apart, see ``is_a_whole_multiple``."""

LARGE_PART = 1e-3
"""A gradient that is a smaller part of the largest may be nothing but rounding, which comes in
whole multiples of the last bit.
"""

MOST_TIMES = 4096
"""No layout has more ranks; a larger factor is not looked at."""

CERTAIN = 1000.0
"""A parameter that is so many times beyond its limit is wrong, however well it is rounded."""


@dataclass(frozen=True)
class RankError:
    """How far one parameter's gradient m on one rank is from the true gradient t.

    ``distance``: ||m - t||. ``error``: ||m - t|| / ||t||. ``element``: the worst
    |m_i - t_i| / max(|t_i|, rms of t), and ``place`` is the index i of that element. ``alone``:
    True if no other element is off. ``bits``: a hash of its bytes; empty if all are zeros.
    ``factor``: the number k for which k t is nearest to m. ``unexplained``: ||m - k t|| / ||m||.
    ``ratio``: ||m|| / ||t||. ``within``: True if error and element are within the limit.
    """

    rank: int
    distance: float
    error: float
    element: float
    factor: float
    unexplained: float
    ratio: float
    within: bool
    place: tuple[int, ...] = ()
    alone: bool = False
    bits: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True)
class ParameterComparison:
    """One parameter in one step on all ranks, with the limit that it is held to.

    ``name`` is the parameter's name, followed by the step if several steps are compared.
    ``norm`` is the norm of the true gradient.
    """

    name: str
    key: GradientKey
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
        return max(self.by_rank, key=lambda rank: (not rank.within, in_order(rank.error)))

    @property
    def error(self) -> float:
        return self.worst.error


@dataclass(frozen=True)
class Comparison:
    """The result for all parameters.

    ``structure`` lists, as sentences, the names, shapes, dtypes and missing gradients that differ;
    ``missing`` has the names of these gradients if nothing but that they are not there differs.
    ``elements`` counts the elements of all compared parameters. ``other_forms`` lists gradients
    whose form alone differs, which is no difference. ``same`` is True only if the ranks also agree
    to the last bit: ranks that train together must leave a step with the same weights, or they
    drift apart. ``by_the_ranks``: each rank has compared its own gradients.
    """

    parameters: tuple[ParameterComparison, ...]
    structure: tuple[str, ...]
    ranks: tuple[int, ...]
    elements: int
    other_forms: tuple[OtherForm, ...] = ()
    missing: tuple[str, ...] = ()
    by_the_ranks: bool = False

    @property
    def fewest_exchanged(self) -> int:
        """A collective on fewer elements than this carries no gradient to another rank.

        A collective on one element does so only if no parameter has more: DDP's constructor
        gathers one, and a loss or a count may be reduced.
        """
        return min(2, max((math.prod(one.shape) for one in self.parameters), default=2))

    @property
    def digests(self) -> Mapping[int, str]:
        """Of what each rank holds: names, shapes and bytes of all parameters that are compared.

        It does not depend on the order of the parameters. Gradients of other bytes have another
        digest, but for a chance of 2^-32 for a tensor of 64 KiB or more. Zeros have one whatever
        their sign.
        """
        hashes = {rank: hashlib.sha256() for rank in self.ranks}
        for one in sorted(self.parameters, key=lambda parameter: parameter.key):
            for of_rank in one.by_rank:
                described = repr((one.key, one.shape)).encode()
                hashes[of_rank.rank].update(described + of_rank.bits)
        return {rank: hashed.hexdigest()[:DIGITS] for rank, hashed in hashes.items()}

    @property
    def ranks_agree(self) -> bool:
        """True if every gradient is bit for bit the same on all ranks."""
        return all(parameter.ranks_agree for parameter in self.parameters)

    @property
    def only_bits_differ(self) -> bool:
        """True if every rank is right within the limits, but not all ranks hold the same bits."""
        within = all(parameter.same for parameter in self.parameters)
        return within and not self.structure and not self.ranks_agree

    @property
    def same(self) -> bool:
        return (
            self.ranks_agree
            and not self.structure
            and all(parameter.same for parameter in self.parameters)
        )

    @property
    def may_be_rounding(self) -> bool:
        """True if something differs, but by so little that rounding may be the reason."""
        return (
            not self.same
            and self.ranks_agree
            and not self.structure
            and all(
                rank.distance <= one.limit.perhaps_rounding
                for one in self.parameters
                for rank in one.by_rank
            )
        )

    @property
    def is_a_whole_multiple(self) -> bool:
        """True if each parameter of a large model that differs is, on each rank, 2, 3 ... times the
        true gradient, or 1/2, 1/3 ... of it, within its limit. Rounding may move a common factor,
        but not there; a few elements that are nothing but rounding may be such multiples, too.
        """
        most = max((one.norm for one in self.parameters), default=0.0)
        return (
            self.elements >= LARGE
            and bool(self.differing)
            and all(
                rank.within
                or (one.norm > LARGE_PART * most and is_whole_multiple(rank, one.limit.relative))
                for one in self.differing
                for rank in one.by_rank
            )
        )

    @property
    def has_useless_limits(self) -> bool:
        """True if a parameter's limit lies above its gradient, which is more than rounding."""
        return any(one.norm > 0 and one.limit.is_useless for one in self.parameters)

    @property
    def differing(self) -> tuple[ParameterComparison, ...]:
        """The parameters beyond their limit, worst first.

        Parameters that are beyond it equally far, up to rounding, stay in the order of the model.
        """
        beyond = [parameter for parameter in self.parameters if not parameter.same]
        return tuple(sorted(beyond, key=_how_wrong, reverse=True))

    @property
    def worst(self) -> ParameterComparison | None:
        """The parameter nearest to its limit, or furthest beyond it.

        One whose true gradient is zero except for rounding, and which is within its limit, is only
        taken if there is no other: its error relative to that gradient says nothing.
        """
        telling = [one for one in self.parameters if not (one.limit.only_rounding and one.same)]
        return max(telling or self.parameters, key=_how_wrong, default=None)

    @property
    def only_rounding(self) -> tuple[ParameterComparison, ...]:
        """The parameters whose true gradient is zero except for rounding."""
        return tuple(one for one in self.parameters if one.limit.only_rounding)


def is_whole_multiple(error: RankError, limit: float) -> bool:
    """True if the gradient is a whole multiple or part of the true one, within this limit."""
    factor = max(error.factor, 1 / error.factor if error.factor else 0.0)
    if not (factor <= MOST_TIMES and limit < NARROW and error.unexplained <= limit):
        return False
    return round(factor) >= 2 and abs(factor - round(factor)) <= limit * factor


def _how_wrong(parameter: ParameterComparison) -> tuple[float, float]:
    """How far beyond its limit the parameter is, and how large the error is.

    Among parameters that are certainly wrong only the error counts: a limit may follow from the
    rounding that was measured, which is another on every processor.
    """
    excess = in_order(_excess(parameter))
    return CERTAIN if excess > CERTAIN else excess, in_order(parameter.error)


def _excess(parameter: ParameterComparison) -> float:
    """The error of the worst rank, divided by the limit."""
    if parameter.limit.relative > 0 and math.isfinite(parameter.limit.relative):
        return parameter.error / parameter.limit.relative
    return math.inf if parameter.error > 0 else 0.0


# A difference raises no error, and nothing is printed: the result is data.

MOSTLY_ONE = 1.02
"""One element alone is off if the sum of all squared differences is less than this many times the
largest squared difference."""


class Comparator:
    """Compares gradients as they arrive. It holds the expected ones, and sums of the measured ones.

    Call ``begin`` for every rank, ``add`` its chunks in any order, then ``finish``. ``owned``: a
    gradient may be on some ranks only, as where each has the optimizer of its own parameters.
    """

    def __init__(
        self,
        expected: Gradients,
        described: Mapping[GradientKey, Description | None],
        tolerance: Tolerance,
        *,
        owned: bool = False,
    ) -> None:
        self._owned = owned
        self._expected = {
            key: None if value is None else dense(value).reshape(-1).numpy()
            for key, value in expected.items()
        }
        self._described = described
        self._several_steps = len({step for step, _ in expected}) > 1
        self._norms = {
            key: norm_of(value) for key, value in self._expected.items() if value is not None
        }
        # A norm can be zero because the squares of tiny numbers are.
        self._zeros = {
            key
            for key, norm in self._norms.items()
            if norm == 0 and not np.any(self._expected[key])
        }
        self._tolerance = tolerance
        self._by_the_ranks = False
        self._ranks: dict[int, Mapping[GradientKey, Description | None]] = {}
        self._sums: dict[tuple[int, GradientKey], Sums] = {}

    def begin(self, rank: int, described: Mapping[GradientKey, Description | None]) -> None:
        """Announce the gradients of a rank. Unexpected ones need not be added afterwards."""
        self._ranks[rank] = described
        for key in described.keys() & self._described.keys():
            description, expected = described[key], self._described[key]
            if description is not None and (
                expected is None or description.shape == expected.shape
            ):
                self._sums[rank, key] = Sums()

    def add(self, rank: int, chunk: Chunk) -> None:
        """Take in one chunk. Chunks of parameters that are not expected are ignored."""
        sums = self._sums.get((rank, chunk.key))
        if sums is None:
            return
        truth = self._expected.get(chunk.key)
        rms = 0.0 if truth is None else self._norms[chunk.key] / math.sqrt(max(1, truth.size))
        sums.take_chunk(chunk, truth, rms)

    def take(self, here: Mapping[int, ComparedHere]) -> None:
        """Take in the sums that the ranks have made themselves, instead of their chunks."""
        self._by_the_ranks = bool(here)
        for rank, of_rank in here.items():
            for key in of_rank.sums:
                if (rank, key) in self._sums:
                    self._sums[rank, key] = sums_of(here, rank, key)

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
        unequal = [one for one in unlike if one.difference]
        missing = dict.fromkeys(one.key[1] for one in unequal if not one.found.named)
        forms = other_forms(unlike)
        of_some_ranks = dict(apart(forms, self._ranks))
        return Comparison(
            parameters=compared,
            structure=(*differences(unlike, self._label), *of_some_ranks.values()),
            ranks=tuple(sorted(self._ranks)),
            elements=sum(math.prod(parameter.shape) for parameter in compared),
            other_forms=tuple(form for form in forms if form not in of_some_ranks),
            missing=tuple(missing) if all(not one.found.named for one in unequal) else (),
            by_the_ranks=self._by_the_ranks,
        )

    def _label(self, key: GradientKey) -> str:
        step, name = key
        return f"{name} (step {step + 1})" if self._several_steps else name

    def _unlike(self) -> Iterator[Unlike]:
        """The gradients whose structure is not the expected one."""
        for rank, measured in sorted(self._ranks.items()):
            for key, description in self._described.items():
                found = measured.get(key)
                if key not in measured and self._is_elsewhere(key):
                    continue
                if found != description or key not in measured:
                    sums = self._sums.get((rank, key))
                    zero = found is not None and sums is not None and sums.is_zero(found.shape)
                    expected = Structure(description, key in self._zeros)
                    yield Unlike(rank, key, Structure(found, zero, key in measured), expected)
            for key in measured.keys() - self._described.keys():
                yield Unlike(rank, key, Structure(measured[key]), expected=None)

    def _is_elsewhere(self, key: GradientKey) -> bool:
        """True if a rank need not have this gradient, since another one has it."""
        return self._owned and any(key in measured for measured in self._ranks.values())

    def _parameter(
        self, key: GradientKey, noise: Noise, autocast: torch.dtype | None, tolerance: Tolerance
    ) -> ParameterComparison:
        norm, described = self._norms[key], self._described[key]
        assert described is not None
        dtypes = [described.dtype, *([] if autocast is None else [autocast])]
        dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        limit = tolerance.limit(norm, noise, dtype, math.prod(described.shape))
        by_rank, bits = [], set()
        for rank, measured in sorted(self._ranks.items()):
            description = measured.get(key)
            if key not in measured and self._is_elsewhere(key):
                continue
            if description is None or description.shape != described.shape:
                absent = b"zeros" if key in self._zeros else b"absent"
                bits.add(absent if description is None else b"other shape")
                continue
            sums = self._sums[rank, key]
            bits.add(b"zeros" if sums.zero else sums.digest)
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
    rank: int, sums: Sums, norm: float, limit: Limit, place: tuple[int, ...]
) -> RankError:
    distance, size = math.sqrt(not_nan(sums.difference)), math.sqrt(not_nan(sums.measured))
    factor = sums.product / (norm * norm) if norm * norm > 0 else math.nan
    rest = sums.measured - factor * sums.product if norm * norm > 0 else sums.measured
    return RankError(
        rank=rank,
        distance=distance,
        error=relative_to(distance, norm),
        element=sums.element,
        factor=factor,
        unexplained=relative_to(math.sqrt(max(0.0, not_nan(rest))), size),
        ratio=relative_to(size, norm),
        within=distance <= limit.absolute and sums.element <= limit.element,
        place=place,
        alone=0 < sums.difference < MOSTLY_ONE * sums.largest * sums.largest,
        bits=b"" if sums.zero else sums.digest,
    )


def _squares_by_step(norms: Mapping[GradientKey, float]) -> dict[int, float]:
    """The squared norm of all gradients of a step together.

    Every step has its own, so that large gradients in one step cannot hide a fault in another.
    """
    squares: dict[int, float] = {}
    for (step, _), norm in norms.items():
        squares[step] = squares.get(step, 0.0) + norm * norm
    return squares


def _index(sums: Sums, shape: tuple[int, ...]) -> tuple[int, ...]:
    place, index = sums.place, []
    for size in reversed(shape) if all(shape) else ():
        place, last = divmod(place, size)
        index.append(last)
    return tuple(reversed(index))


# Compare gradients that are all in the memory of this process.


def compare(
    expected: Mapping[str, Tensor | None],
    measured: Mapping[int, Mapping[str, Tensor | None]],
    tolerance: Tolerance,
    noise: Mapping[str, Noise] | None = None,
) -> Comparison:
    """Compare the gradients of every rank, ``measured[rank][name]``, with the expected ones.

    ``expected`` are the true gradients, in float64. Raises SuiteBug if a measured gradient shares
    its memory with the expected one, since comparing a gradient with itself shows nothing.
    """
    truth = in_first_step(expected)
    described = {
        key: description and Description(description.shape, tolerance.dtype, description.layout)
        for key, description in describe(truth).items()
    }
    comparator = Comparator(truth, described, tolerance)
    for rank, by_name in measured.items():
        gradients = in_first_step(by_name)
        for key, gradient in gradients.items():
            _check_memory(rank, key, gradient, truth.get(key))
        comparator.begin(rank, describe(gradients))
        for chunk in chunks(gradients):
            comparator.add(rank, chunk)
    return comparator.finish({(0, name): value for name, value in (noise or {}).items()})


def _check_memory(
    rank: int, key: GradientKey, gradient: Tensor | None, expected: Tensor | None
) -> None:
    if gradient is None or expected is None or not gradient.numel():
        return
    if gradient.is_sparse or expected.is_sparse:
        return
    if gradient.data_ptr() == expected.data_ptr():
        raise SuiteBug(f"{key[1]} of rank {rank} is the reference itself: same memory")


# Everything but the values of a gradient: whether there is one, its shape, dtype and form.


class Form(Enum):
    """The forms in which the same values can come."""

    ABSENT = "no gradient"
    ZEROS = "a gradient of zeros"
    SPARSE = "sparse"
    DENSE = "dense"


@dataclass(frozen=True)
class OtherForm:
    """A gradient that has the values of the big batch on these ranks, but another form.

    An optimizer may treat the forms differently: it skips a parameter without a gradient, but
    weight decay and momentum move a parameter whose gradient is zero.
    """

    name: str
    in_big_batch: Form
    on_ranks: Form
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Structure:
    """The structure of one gradient. ``zero`` is True if all its elements are zeros.

    ``description`` is None without a gradient. ``named`` is False if not even its name is there.
    """

    description: Description | None
    zero: bool = False
    named: bool = True

    @property
    def is_nothing(self) -> bool:
        """True if there is no gradient, or one of zeros: these count as equal."""
        return self.description is None or self.zero


@dataclass(frozen=True)
class Unlike:
    """A gradient of a rank whose structure is not that of the big batch.

    ``expected`` is None for a name that no parameter of the model has.
    """

    rank: int
    key: GradientKey
    found: Structure
    expected: Structure | None

    @property
    def difference(self) -> str:
        """Says what differs, as a clause; "" if nothing but the form does."""
        if self.expected is None:
            return "is not a parameter of the model"
        found, right = self.found.description, self.expected.description
        if found is None or right is None:
            if self.found.is_nothing and self.expected.is_nothing:
                return ""
            return f"is {found}, expected {right}" if self.found.named else "is missing"
        if found.shape != right.shape:
            return f"is {found}, expected {right}"
        if found.dtype != right.dtype:
            return f"is {found.dtype_name} instead of {right.dtype_name}"
        return ""

    @property
    def forms(self) -> tuple[Form, Form] | None:
        """The form in the big batch, and the one that was found; None if something else differs."""
        if self.expected is None or self.difference:
            return None
        found, right = self.found.description, self.expected.description
        if found is not None and right is not None:
            forms = Form.SPARSE, Form.DENSE
            return forms if right.is_sparse else forms[::-1]
        one = found or right
        if one is None or not prod(one.shape):
            return None
        return (Form.ABSENT, Form.ZEROS) if right is None else (Form.ZEROS, Form.ABSENT)


def differences(unlike: Iterable[Unlike], label: Callable[[GradientKey], str]) -> tuple[str, ...]:
    """One sentence for every difference, by rank and then in alphabetical order."""
    sentences = (
        (one.rank, f"rank {one.rank}: {label(one.key)} {one.difference}")
        for one in unlike
        if one.difference
    )
    return tuple(sentence for _, sentence in sorted(sentences))


def apart(forms: Iterable[OtherForm], ranks: Iterable[int]) -> Iterator[tuple[OtherForm, str]]:
    """The forms that only some of the ranks have, and what follows from it, as a sentence.

    Weight decay or momentum would move the parameter on these ranks alone.
    """
    every_rank = set(ranks)
    for form in forms:
        if Form.ZEROS in (form.in_big_batch, form.on_ranks) and set(form.ranks) != every_rank:
            listed = ", ".join(map(str, form.ranks))
            noun = "rank" if len(form.ranks) == 1 else "ranks"
            yield (
                form,
                f"{noun} {listed}: {form.name} has {form.on_ranks.value}, and on other ranks "
                f"{form.in_big_batch.value}: an optimizer may move them apart",
            )


def other_forms(unlike: Iterable[Unlike]) -> tuple[OtherForm, ...]:
    """The gradients whose form differs, in any step, and nothing else does."""
    ranks: dict[tuple[str, Form, Form], set[int]] = {}
    for one in unlike:
        if one.forms is not None:
            ranks.setdefault((one.key[1], *one.forms), set()).add(one.rank)
    return tuple(OtherForm(*form, ranks=tuple(sorted(having))) for form, having in ranks.items())
