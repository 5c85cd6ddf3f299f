"""Tells whether the values that ranks have are those that one rank has, divided among them.

The ranks of a right step have, of each value of the same step on one rank with the whole batch: the
value itself, the rows of their own examples, another part that they were seen to take, a term of
its sum or mean, or a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from typing import Literal

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.whereabouts.closeness import Close, finite, go_further
from ddp_equivalence.diagnosis.whereabouts.selections import Selection, index_of
from ddp_equivalence.measurement.operations import Value

Kinship = Literal[
    "whole", "scaled", "rows", "slice", "sum", "extreme", "packed", "other", "unknown"
]
"""What the ranks have of a value of one rank: the value; a multiple of it, all of them the same;
the rows of their examples, or other parts that they take; a slice of it; a part of a sum or mean
that is the value; a value of which the largest or the smallest is the value; several numbers of
these kinds in one tensor; another value. "unknown" if the shapes cannot be compared.
"""

RELATED: tuple[Kinship, ...] = ("whole", "scaled", "rows", "slice", "sum", "extreme", "packed")

MOST_PACKED = 16
"""Longer lists are not taken for several numbers that were put into one tensor."""

MOST_CHOICES = 48
"""So many ways to take parts along several dimensions are tried."""


@dataclass(frozen=True)
class Deal:
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
        """What a value of each rank may be multiplied with, if its step is right: nothing, the
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

    how: Kinship
    by: frozenset[Selection] = field(default_factory=frozenset)


def related(by_rank: Sequence[Value], alone: Value, deal: Deal) -> Related:
    """How the values of the ranks are related to that of one rank alone, and what shows it."""
    whole = alone.tensor
    parts = [one.tensor for one in by_rank]
    if any(bool(one.isnan().any()) for one in (whole, *parts)):
        return Related("unknown")
    whole, *parts = finite([whole, *parts])
    close = Close.of([whole, *parts], deal.eps, deal.scale)
    factors = deal.factors if alone.is_floating_point else deal.factors[:1]
    is_alike = all(part.shape == whole.shape for part in parts)
    if is_alike:
        if _is_whole(parts, whole, factors[:1], close):
            return Related("whole")
        if _is_whole(parts, whole, factors, close):
            return Related("scaled")
        if _is_sum(parts, whole, factors, close):
            return Related("sum")
    elif not alone.is_floating_point and go_further(parts, whole):
        return Related("unknown")
    is_comparable = is_alike
    for wholes, by in islice(_choices(parts, whole, deal), MOST_CHOICES):
        is_comparable = True
        if _is_whole(parts, wholes, factors, close):
            return Related("rows", by)
        if any(_is_sum_in(groups, parts, wholes, factors, close) for groups in deal.groups):
            return Related("sum", by)
    if is_alike:
        return Related(_of_numbers(parts, whole, close))
    if is_comparable:
        return Related("other")
    slices = _slices(parts, whole)
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


def _of_numbers(parts: Sequence[Tensor], whole: Tensor, close: Close) -> Kinship:
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


Choice = tuple[Selection | None, list[Tensor] | None]
"""A selection along one dimension, and for each rank the positions; None: all of it, as it is."""


def _choices(
    parts: Sequence[Tensor], whole: Tensor, deal: Deal
) -> Iterator[tuple[list[Tensor], frozenset[Selection]]]:
    """What each rank may have of ``whole``: its parts along some dimensions, or all of it in the
    order in which the ranks have their parts.
    """
    if any(part.ndim != whole.ndim for part in parts):
        return
    dims = [list(_along(dim, parts, whole, deal)) for dim in range(whole.ndim)]
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


def _along(dim: int, parts: Sequence[Tensor], whole: Tensor, deal: Deal) -> Iterator[Choice]:
    size = whole.shape[dim]
    sizes = [part.shape[dim] for part in parts]
    if all(one == size for one in sizes):
        yield None, None
    for one in deal.selections:
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


def _slices(parts: Sequence[Tensor], whole: Tensor) -> list[Tensor] | None:
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
