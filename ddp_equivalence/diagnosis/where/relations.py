"""Tells whether the values that ranks have are those that one rank has, divided among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, combinations, islice, product
from typing import Literal

import torch
from torch import Tensor

from ddp_equivalence.measurement.calls import Value

# Which positions along a dimension each rank has: those of its examples, or any other part.
#
# Ranks may also hold parts of a sequence, or of the units of a layer. Which ones is read off the
# values themselves: a slice of a value of one rank that is found again in the value of a rank.

MOST_POSITIONS = 4_096
"""A dimension with more positions is not looked at."""

MOST_SELECTIONS = 6

Values = tuple[Sequence[Value], Value]
"""A value as the ranks have it, and as one rank has it."""


@dataclass(frozen=True)
class Selection:
    """``of_rank``: for each rank the positions that it has, in its order. ``size``: how many
    positions there are.
    """

    of_rank: tuple[tuple[int, ...], ...]
    size: int

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that have the same positions, together."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, positions in enumerate(self.of_rank):
            found.setdefault(positions, []).append(rank)
        return tuple(map(tuple, found.values()))

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        """All positions in the order in which the ranks have them; () if that is no other order."""
        order = tuple(chain.from_iterable(dict.fromkeys(self.of_rank)))
        every = tuple(range(self.size))
        return () if order == every or tuple(sorted(order)) != every else order

    @cached_property
    def is_of_parts(self) -> bool:
        """True if the ranks have parts that together are the whole, each position equally often."""
        times = Counter(chain.from_iterable(self.of_rank))
        return len(self.groups) > 1 and len(times) == self.size and len({*times.values()}) == 1

    def rivals(self, other: Selection) -> bool:
        """True if the same ranks have other parts of something equally large."""
        same = self.size == other.size and self.groups == other.groups
        return same and self.of_rank != other.of_rank


def index_of(positions: Sequence[int], size: int, of: int, *, side_by_side: bool) -> Tensor:
    """The positions in a dimension that has several places for each of ``size`` positions.

    ``of``: the size of the dimension. ``side_by_side``: the places of one position are neighbours;
    otherwise the dimension is a repetition of all positions.
    """
    each = of // size
    if side_by_side:
        index = [one * each + number for one in positions for number in range(each)]
    else:
        index = [number * size + one for number in range(each) for one in positions]
    return torch.tensor(index, dtype=torch.long)


def found_in(values: Iterable[Values], known: Sequence[Selection]) -> list[Selection]:
    """The selections by which parts of these values were taken, the most frequent first.

    ``known``: those that are known already.
    """
    votes: Counter[Selection] = Counter()
    for parts, whole in values:
        for selection in _of_value(parts, whole, (*known, *votes)):
            votes[selection] += 1
    return [one for one, _ in votes.most_common() if one not in known][:MOST_SELECTIONS]


def _of_value(
    by_rank: Sequence[Value], alone: Value, known: Sequence[Selection]
) -> Iterator[Selection]:
    shapes = [one.shape for one in by_rank]
    if any(len(shape) != len(alone.shape) for shape in shapes):
        return
    smaller = [
        dim for dim, size in enumerate(alone.shape) if any(shape[dim] != size for shape in shapes)
    ]
    if any(shape[dim] > alone.shape[dim] for dim in smaller for shape in shapes):
        return
    parts, whole = [one.tensor for one in by_rank], alone.tensor
    if len(smaller) == 1:
        found = _taken(parts, [whole] * len(parts), smaller[0])
        if found is not None:
            yield found
    elif len(smaller) == 2:
        for dim, other in (smaller, smaller[::-1]):
            for one in known:
                if one.size != whole.shape[dim]:
                    continue
                wholes = [whole.index_select(dim, torch.tensor(own)) for own in one.of_rank]
                found = _taken(parts, wholes, other)
                if found is not None:
                    yield found
                    return


def _taken(parts: Sequence[Tensor], wholes: Sequence[Tensor], dim: int) -> Selection | None:
    """The positions of these parts along a dimension; None if they are no such parts."""
    size = wholes[0].shape[dim]
    if not 2 <= size <= MOST_POSITIONS:
        return None
    of_rank = []
    for part, whole in zip(parts, wholes, strict=True):
        if any(
            a != b for n, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if n != dim
        ):
            return None
        places = {one: number for number, one in enumerate(_slices(whole, dim))}
        if len(places) != size:
            return None  # equal slices do not tell which of them was taken
        taken = [places.get(one) for one in _slices(part, dim)]
        if None in taken or not taken:
            return None
        of_rank.append(tuple(one for one in taken if one is not None))
    selection = Selection(tuple(of_rank), size)
    return selection if selection.is_of_parts else None


def _slices(tensor: Tensor, dim: int) -> Iterator[bytes]:
    if not tensor.numel():
        return iter([b""] * tensor.shape[dim])
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).contiguous()
    return (row.numpy().tobytes() for row in rows)


# Tells whether the values that ranks have are those that one rank has, divided among them.
#
# The ranks of a right step have, of each value of the same step on one rank with the whole batch:
# the value itself, the rows of their own examples, another part that they were seen to take, a
# term of its sum or mean, or a slice.

Relation = Literal[
    "whole", "scaled", "rows", "slice", "sum", "extreme", "packed", "positions", "other", "unknown"
]
"""How the ranks have a value of one rank: the value; a multiple of it, all of them the same;
the rows of their examples, or other parts that they take; a slice of it; a part of a sum or mean
that is the value; a value of which the largest or the smallest is the value; several numbers of
these kinds in one tensor; positions that each rank counts in its own part, or what is made of
these; another value. "unknown" if the shapes cannot be compared.
"""

RELATED: tuple[Relation, ...] = ("whole", "scaled", "rows", "slice", "sum", "extreme", "packed")

MOST_PACKED = 16
"""Longer lists are not taken for several numbers that were put into one tensor."""

MOST_CHOICES = 48
"""So many ways to take parts along several dimensions are tried."""


@dataclass(frozen=True)
class Sharing:
    """How the ranks share the whole batch. ``rows``: for each rank, the positions of its examples
    among those of the one rank. ``eps``: of the least precise dtype in which the step computes.
    ``scale``: the largest element of the gradients; what is smaller by far is rounding. ``others``:
    the parts that the ranks take of other things than the batch.
    """

    rows: tuple[tuple[int, ...], ...]
    examples: int
    eps: float = torch.finfo(torch.float64).eps
    scale: float = 0.0
    others: tuple[Selection, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @cached_property
    def selections(self) -> tuple[Selection, ...]:
        """The rows, and all others."""
        return (Selection(self.rows, self.examples), *self.others)

    @cached_property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The ways to divide the ranks into groups whose parts may add up: those of ranks that
        have the same part of something else.
        """
        found = dict.fromkeys(one.groups for one in self.selections)
        return tuple(
            groups
            for groups in found
            if len(groups) > 1 and len({len(group) for group in groups}) == 1 < len(groups[0])
        )

    @cached_property
    def factors(self) -> tuple[tuple[float, ...], ...]:
        """The factors that a value of each rank may have, if its step is right: none, the
        world size, the rank's share of the examples, or one divided by these; with groups of ranks
        also their size.
        """
        world_size = self.world_size
        shares = [len(rows) / self.examples for rows in self.rows]
        sizes = [world_size, *(len(groups[0]) for groups in self.groups)]
        found = [(1.0,) * world_size]
        for size in sizes:
            found += [(float(size),) * world_size, (1 / size,) * world_size]
        if all(shares):
            found += [
                tuple(shares),
                tuple(1 / share for share in shares),
                tuple(world_size * share for share in shares),
                tuple(1 / (world_size * share) for share in shares),
            ]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Related:
    """``how``: the ranks' values are related to that of one rank. ``by``: the selections with
    which their parts were taken.
    """

    how: Relation
    by: frozenset[Selection] = field(default_factory=frozenset)


def related(by_rank: Sequence[Value], alone: Value, sharing: Sharing) -> Related:
    """How the values of the ranks are related to that of one rank alone, and what shows it."""
    whole = alone.tensor
    parts = [one.tensor for one in by_rank]
    if any(bool(one.isnan().any()) for one in (whole, *parts)):
        return Related("unknown")
    whole, *parts = finite([whole, *parts])
    close = Close.of([whole, *parts], sharing.eps, sharing.scale)
    factors = sharing.factors if alone.is_floating_point else sharing.factors[:1]
    is_alike = all(part.shape == whole.shape for part in parts)
    if is_alike:
        if _is_whole(parts, whole, factors[:1], close):
            return Related("whole")
        if _is_whole(parts, whole, factors, close):
            return Related("scaled")
        if _is_sum(parts, whole, factors, close):
            return Related("sum")
        if not alone.is_floating_point and alone.dtype != "bool" and are_shifted(parts, whole):
            return Related("positions")
    elif not alone.is_floating_point and go_further(parts, whole):
        return Related("unknown")
    is_comparable = is_alike
    for wholes, by in islice(_choices(parts, whole, sharing), MOST_CHOICES):
        is_comparable = True
        if _is_whole(parts, wholes, factors, close):
            return Related("rows", by)
        if any(_is_sum_in(groups, parts, wholes, factors, close) for groups in sharing.groups):
            return Related("sum", by)
    if is_alike:
        return Related(_of_numbers(parts, whole, close))
    if is_comparable:
        return Related("other")
    slices = _slices_of_flat(parts, whole)
    if slices is not None:
        return Related("slice" if _is_whole(parts, slices, factors, close) else "other")
    return Related("unknown")


def _is_whole(
    parts: Sequence[Tensor],
    wholes: Tensor | Sequence[Tensor],
    factors: Sequence[tuple[float, ...]],
    close: Close,
) -> bool:
    """True if each rank has its own of ``wholes``, times its factor."""
    each = [wholes] * len(parts) if isinstance(wholes, Tensor) else wholes
    return any(
        all(
            close(part, factor * whole)
            for part, factor, whole in zip(parts, of_ranks, each, strict=True)
        )
        for of_ranks in factors
    )


def _is_sum(
    parts: Sequence[Tensor], whole: Tensor, factors: Sequence[tuple[float, ...]], close: Close
) -> bool:
    """True if the values of the ranks, times their factors, add up to ``whole``."""
    stacked = torch.stack(list(parts))
    return any(
        close(torch.tensordot(torch.tensor(one, dtype=torch.float64), stacked, 1), whole)
        for one in factors
    )


def _is_sum_in(
    groups: Sequence[tuple[int, ...]],
    parts: Sequence[Tensor],
    wholes: Sequence[Tensor],
    factors: Sequence[tuple[float, ...]],
    close: Close,
) -> bool:
    """True if the values of the ranks of each group add up to what each of them should have."""
    if any(parts[rank].shape != parts[group[0]].shape for group in groups for rank in group):
        return False
    sums = [(group, torch.stack([parts[rank] for rank in group]).sum(0)) for group in groups]
    return any(
        all(close(factor[rank] * total, wholes[rank]) for group, total in sums for rank in group)
        for factor in factors
        if len({*factor}) == 1
    )


def _of_numbers(parts: Sequence[Tensor], whole: Tensor, close: Close) -> Relation:
    """The relation of numbers of which the largest or smallest counts, or that are several."""
    stacked = torch.stack(list(parts))
    if whole.numel() and (close(stacked.amax(0), whole) or close(stacked.amin(0), whole)):
        return "extreme"
    if whole.ndim != 1 or not 2 <= whole.numel() <= MOST_PACKED:
        return "other"
    numbers = [
        any(
            close(found[place], whole[place])
            for found in (stacked.sum(0), stacked.amax(0), stacked.amin(0))
        )
        for place in range(whole.numel())
    ]
    return "packed" if all(numbers) else "other"


def farthest(
    by_rank: Sequence[Value], alone: Value, sharing: Sharing
) -> tuple[int, float, float] | None:
    """A rank, an element that it has, and the element of one rank's value that it should have,
    where these differ most; None if the ranks have no parts of this size.
    """
    parts = [one.tensor for one in by_rank]
    wholes, _ = next(_choices(parts, alone.tensor, sharing), (None, None))
    if wholes is None:
        return None
    off = [(one - other).abs() for one, other in zip(parts, wholes, strict=True)]
    most = [float(one.max()) if one.numel() else 0.0 for one in off]
    rank = most.index(max(most))
    if not most[rank] > 0:
        return None
    place = int(off[rank].argmax())
    return rank, float(parts[rank].flatten()[place]), float(wholes[rank].flatten()[place])


Choice = tuple[Selection | None, list[Tensor] | None]
"""A selection along one dimension, and for each rank the positions; None: all of it, as it is."""


def _choices(
    parts: Sequence[Tensor], whole: Tensor, sharing: Sharing
) -> Iterator[tuple[list[Tensor], frozenset[Selection]]]:
    """The part of ``whole`` that each rank may have: along some dimensions, or all of it in the
    order in which the ranks have their parts.
    """
    if any(part.ndim != whole.ndim for part in parts):
        return
    dims = [list(_along(dim, parts, whole, sharing)) for dim in range(whole.ndim)]
    for choice in product(*dims):
        by = frozenset(one for one, _ in choice if one is not None)
        if not by:
            continue
        wholes = []
        for rank in range(len(parts)):
            part = whole
            for dim, (_, index) in enumerate(choice):
                part = part if index is None else part.index_select(dim, index[rank])
            wholes.append(part)
        yield wholes, by


def _along(dim: int, parts: Sequence[Tensor], whole: Tensor, sharing: Sharing) -> Iterator[Choice]:
    size = whole.shape[dim]
    sizes = [part.shape[dim] for part in parts]
    if all(one == size for one in sizes):
        yield None, None
    for one in sharing.selections:
        each = size // one.size if one.size and size % one.size == 0 else 0
        if not each:
            continue
        orders = (True, False) if each > 1 else (True,)
        taken = sizes == [each * len(positions) for positions in one.of_rank]
        every = tuple(range(one.size))
        if taken and any(positions != every for positions in one.of_rank):
            for side_by_side in orders:
                yield (
                    one,
                    [
                        index_of(positions, one.size, size, side_by_side=side_by_side)
                        for positions in one.of_rank
                    ],
                )
        if one.gathered and all(number == size for number in sizes):
            for side_by_side in orders:
                index = index_of(one.gathered, one.size, size, side_by_side=side_by_side)
                yield one, [index] * len(parts)


def _slices_of_flat(parts: Sequence[Tensor], whole: Tensor) -> list[Tensor] | None:
    """For each rank, its slice of a flat tensor that all ranks have in equal slices, the last one
    padded with zeros; None if the shapes are not those of such slices.
    """
    size = parts[0].numel()
    padding = size * len(parts) - whole.numel()
    if whole.ndim != 1 or any(part.shape != (size,) for part in parts):
        return None
    if not 0 <= padding < max(size, len(parts)):
        return None
    return list(torch.nn.functional.pad(whole, (0, padding)).split(size))


# Tells whether the values of two tensors are equal up to rounding.

LEAST_TOLERANCE = 1e-9
ROUNDING = 200.0
"""Values are equal if they differ by at most this many eps of the largest, or by the least."""


def go_further(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """True if a rank has a whole number above all of one rank, as where positions are padded."""
    most = max((float(one.max()) for one in parts if one.numel()), default=0.0)
    return whole.numel() > 0 and most > float(whole.max())


def are_shifted(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """True if each rank has the numbers of one rank less a number of its own, as where it counts
    positions from the begin of its part.
    """
    return whole.numel() > 1 and all(len((part - whole).unique()) == 1 for part in parts)


def finite(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with another number in the place of infinity, as masks leave it."""
    if all(bool(one.isfinite().all()) for one in tensors):
        return list(tensors)
    finite = [one[one.isfinite()] for one in tensors]
    most = 1 + 2 * max((float(one.abs().max()) for one in finite if one.numel()), default=0.0)
    return [one.nan_to_num(posinf=most, neginf=-most) for one in tensors]


@dataclass(frozen=True)
class Close:
    """Whether two tensors are equal up to rounding."""

    most: float

    @classmethod
    def of(cls, tensors: Sequence[Tensor], eps: float, scale: float) -> Close:
        largest = max((float(one.abs().max()) for one in tensors if one.numel()), default=0.0)
        tolerance = max(LEAST_TOLERANCE, ROUNDING * eps)
        return cls(max(tolerance * largest, ROUNDING * eps * scale))

    def __call__(self, one: Tensor, other: Tensor) -> bool:
        return not one.numel() or float((one - other).abs().max()) <= self.most


# Tells whether a value is among those that the loss of the case computes, in any arrangement.
#
# Values are compared by their lengths and by two fixed random projections of their directions, so
# that looking one up takes no longer if many are known.

Known = Literal["yes", "no", "unknown"]
"""Whether the loss of the case computes this value; "unknown" if too little can tell."""

LEAST_STEP = 1e-7
STEPS_OF_ROUNDING = 1e3
"""Numbers are equal if they differ by less than this many eps, or the least, relative to them."""

MOST_ROWS = 300
"""So many rows of a value are looked up: if all of them are known, the value is."""

FEWEST_WHOLE_NUMBERS = 6
FEWEST_TRUTH_VALUES = 16
"""Rows of so many whole numbers, or truth values, are not equal by chance."""

VARIED = 16
"""Rows of a value that has so many different elements are equal only if they are the same."""

Key = tuple[int, ...]

ZERO: Key = ()
"""The key of a row that is zero."""


class KnownValues:
    """Holds values, and recognises them as they are, as a multiple, with their last two dims
    transposed, any choice of their rows, such rows with others between them, and slices of masks.

    ``multiples``: what the value of a scalar may be multiplied by. ``eps``: of the least precise
    dtype.
    """

    def __init__(self, values: Iterable[Value], multiples: Iterable[float], eps: float) -> None:
        self._step = max(LEAST_STEP, STEPS_OF_ROUNDING * eps)
        self._multiples = tuple({1.0, *multiples})
        self._scalars: list[float] = []
        self._whole: dict[int, set[Key]] = {}
        self._rows: dict[int, set[Key]] = {}
        self._each: dict[int, list[frozenset[Key]]] = {}
        self._slices: dict[tuple[int, int], list[tuple[Key, ...]]] = {}
        for value in values:
            self._add(value)

    def _add(self, value: Value) -> None:
        tensor = value.tensor
        if not tensor.numel() or not tensor.isfinite().all():
            return
        if tensor.numel() == 1:
            self._scalars.append(float(tensor))
        turned = [tensor.transpose(-1, -2)] if tensor.ndim > 1 else []
        for one in (tensor, *turned):
            self._whole.setdefault(one.numel(), set()).update(self._directions(one))
        is_varied = _is_varied(tensor)
        for dim, rows in _rows(tensor, value):
            keys = tuple(self.keys(rows))
            if dim and not is_varied:
                self._slices.setdefault((dim, rows.shape[1]), []).append(keys)
                continue
            self._rows.setdefault(rows.shape[1], set()).update(keys)
            if 1 < len(keys) <= MOST_ROWS:
                self._each.setdefault(rows.shape[1], []).append(frozenset(keys) - {ZERO})
        self._rows.setdefault(tensor.numel(), set()).update(self.keys(tensor.reshape(1, -1)))

    def has(self, value: Value) -> Known:
        """Whether this value is one of those that are known."""
        tensor = value.tensor
        if not tensor.numel() or not tensor.isfinite().all():
            return "unknown"
        if tensor.numel() == 1:
            return "yes" if self._has_scalar(float(tensor)) else "no"
        flat = tensor.reshape(1, -1)
        if bool((flat == flat[0, 0]).all()):
            return "unknown"  # a constant: it may be a mask that hides nothing
        known = self._whole.get(tensor.numel(), set())
        if any(_is_near(key, known) for key in self._directions(tensor)):
            return "yes"
        if all(_is_near(key, self._rows.get(tensor.numel(), ())) for key in self.keys(flat)):
            return "yes"  # one row of a known value
        looked_up, is_varied = False, _is_varied(tensor)
        for dim, rows in _rows(tensor, value):
            looked_up = True
            keys = tuple(self.keys(rows[:MOST_ROWS]))
            if dim and not is_varied:
                found = self._is_slice(dim, rows, keys)
            else:
                found = self._has_rows(rows, {*keys} - {ZERO})
            if found:
                return "yes"
        return "no" if looked_up or tensor.numel() in self._whole else "unknown"

    def _has_rows(self, rows: Tensor, keys: set[Key]) -> bool:
        """True if all of these rows are known, or if all rows of a known value are among them, and
        at most as many others.
        """
        known = self._rows.get(rows.shape[1], set())
        return all(_is_near(key, known) for key in keys) or any(
            2 * len(each) >= len(keys) and all(_is_near(key, keys) for key in each)
            for each in self._each.get(rows.shape[1], ())
        )

    def _is_slice(self, dim: int, rows: Tensor, keys: tuple[Key, ...]) -> bool:
        """True if these rows follow each other in a known value along the same dim."""
        return any(
            all(_is_near(key, {other}) for key, other in zip(keys, each[first:], strict=False))
            for each in self._slices.get((dim, rows.shape[1]), ())
            for first in range(len(each) - len(keys) + 1)
        )

    def _has_scalar(self, number: float) -> bool:
        return any(
            abs(number - factor * one) <= self._step * abs(number)
            for one in self._scalars
            for factor in self._multiples
        )

    def _directions(self, tensor: Tensor) -> Iterator[Key]:
        """The key of all elements as one row, whatever positive or negative multiple they are."""
        flat = tensor.reshape(1, -1)
        length = flat.norm()
        if float(length) > 0:
            projected = (flat / length) @ _projections(flat.shape[1])
            projected = projected * projected[0, 0].sign()
            yield tuple((projected[0] / self._step).round().long().tolist())

    def keys(self, rows: Tensor) -> Iterator[Key]:
        """The key of each row."""
        lengths = rows.norm(dim=1, keepdim=True)
        directions = rows / lengths.clamp(min=torch.finfo(torch.float64).tiny)
        projected = torch.cat([lengths.log(), directions @ _projections(rows.shape[1])], 1)
        for length, key in zip(lengths, projected / self._step, strict=True):
            yield tuple(key.round().long().tolist()) if float(length) > 0 else ZERO


Places = tuple[frozenset[int], ...]
"""For each row the examples that it may be of."""

FEWEST_DIRECTIONS = 3
"""Rows of so many numbers have directions of their own."""


class Rows:
    """Recognises rows of values, or multiples of them, by the examples that they are of.

    ``whole``: values that were computed of all examples in their order, and ``backwards``: the same
    in the reverse order. Those that are reversed along one of their first two dimensions have a row
    for each example there. ``parts``: the same values, and the examples that they are computed of.
    Lists of few different whole numbers are not recognised. Without arguments it recognises none.
    """

    def __init__(
        self,
        whole: Sequence[Value | None] = (),
        backwards: Sequence[Value | None] = (),
        parts: Iterable[tuple[Sequence[Value | None], Sequence[int]]] = (),
        eps: float = 0.0,
    ) -> None:
        self._keys = KnownValues((), (), eps).keys
        self._known: dict[int, dict[Key, set[int]]] = {}
        pairs = enumerate(zip(whole, backwards, strict=False))
        dims = {n: _dim_of_examples(one, other, eps) for n, (one, other) in pairs}
        for values, examples in parts:
            for number, dim in dims.items():
                value = values[number] if number < len(values) else None
                if dim is not None and value is not None:
                    self._add(value, dim, examples)

    def _add(self, value: Value, dim: int, examples: Sequence[int]) -> None:
        tensor = value.tensor
        if tensor.ndim <= dim or tensor.shape[dim] != len(examples) or not tensor.numel():
            return
        rows = tensor.movedim(dim, 0).reshape(len(examples), -1)
        is_told = value.is_floating_point or len(rows.unique(dim=0)) * 2 >= len(examples)
        if not rows.shape[1] or not is_told or not tensor.isfinite().all():
            return
        known = self._known.setdefault(rows.shape[1], {})
        for example, key in zip(examples, self._of_rows(rows), strict=True):
            known.setdefault(key, set()).add(example)

    def of(self, value: Value) -> Places | None:
        """The examples that each row may be of; None if one is not known, or if all are equal."""
        tensor = value.tensor
        if not self._known or not tensor.numel() or not tensor.isfinite().all():
            return None
        for dim in range(min(tensor.ndim, 2)):
            rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
            known = self._known.get(rows.shape[1], {})
            if known and 1 < len(rows) <= MOST_ROWS:
                found = tuple(_of_near(key, known) for key in self._of_rows(rows))
                if all(found) and len(set(found)) > 1:
                    return found
        return None

    def joined(self, values: Iterable[Value]) -> tuple[int, int] | None:
        """Two different examples whose rows stand at the same place of two of these values."""
        places = [found for one in values if (found := self.of(one)) is not None]
        for one, other in combinations(places, 2):
            if not agree(one, other):
                return next((min(a), min(b)) for a, b in zip(one, other, strict=True) if not a & b)
        return None

    def _of_rows(self, rows: Tensor) -> Iterator[Key]:
        """The keys of the rows, without their lengths where their directions tell them apart."""
        begin = 1 if rows.shape[1] >= FEWEST_DIRECTIONS else 0
        return (key[begin:] for key in self._keys(rows))


def _dim_of_examples(value: Value | None, turned: Value | None, eps: float) -> int | None:
    """The dimension along which the second value is the first in the reverse order."""
    if value is None or turned is None or value.shape != turned.shape or not value.elements:
        return None
    one, other = value.tensor, turned.tensor
    if not one.isfinite().all() or not other.isfinite().all():
        return None
    close = Close.of([one, other], eps, 0.0)
    if close(one, other):
        return None
    dims = range(min(one.ndim, 2))
    return next((dim for dim in dims if close(one.flip(dim), other)), None)


def agree(one: Places, other: Places) -> bool:
    """True if rows at the same places may be of the same examples."""
    return len(one) != len(other) or all(a & b for a, b in zip(one, other, strict=True))


def _of_near(key: Key, known: Mapping[Key, set[int]]) -> frozenset[int]:
    """What is known of the keys whose numbers differ by one step at most."""
    moves = product((-1, 0, 1), repeat=len(key))
    near = (tuple(map(sum, zip(key, move, strict=True))) for move in moves)
    return frozenset().union(*(known.get(one, ()) for one in near))


def _is_near(key: Key, known: Collection[Key]) -> bool:
    """True if a key is there whose numbers differ by one step at most."""
    if key in known:
        return True
    moves = product((-1, 0, 1), repeat=len(key))
    return any(tuple(map(sum, zip(key, move, strict=True))) in known for move in moves)


def _is_varied(tensor: Tensor) -> bool:
    """False for a mask and its kind, whose rows along any other dim than the first say little."""
    return len(tensor.unique()) >= min(VARIED, tensor.numel() // 2)


def _rows(tensor: Tensor, value: Value) -> Iterator[tuple[int, Tensor]]:
    """The value as rows along each of its dims, where rows cannot be equal by chance."""
    dims = range(tensor.ndim) if value.is_floating_point else range(min(tensor.ndim, 1))
    for dim in dims:
        rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
        fewest = 1 if value.is_floating_point else FEWEST_WHOLE_NUMBERS
        if value.dtype == "bool":
            fewest = FEWEST_TRUTH_VALUES
        if rows.shape[1] >= fewest:
            yield dim, rows


@cache
def _projections(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 2, generator=generator, dtype=torch.float64)
