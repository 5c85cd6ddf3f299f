"""Which positions along a dimension each rank has: those of its examples, or any other part.

Ranks may also hold parts of a sequence, or of the units of a layer. Which ones is read off the
values themselves: a slice of a value of one rank that is found again in the value of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from ddp_equivalence.measurement.operations import Value

MOST_POSITIONS = 4_096
"""A dimension with more positions is not looked at."""

MOST_SELECTIONS = 6

Values = tuple[Sequence[Value], Value]
"""What the ranks have of one value, and what one rank has."""


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
