"""Tells whether the values that ranks have are those that one rank has, divided among them.

The ranks of a right step have, of each value of the same step on one rank with the whole batch: the
value itself, the rows of their own examples, a term of its sum or mean, or a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from ddp_equivalence.measurement.operations import Value

Kinship = Literal["whole", "scaled", "rows", "slice", "sum", "other", "unknown"]
"""What the ranks have of a value of one rank: the value; a multiple of it, all of them the same;
the rows of their examples; a slice of it; a part of a sum or mean that is the value; another value.
"unknown" if the shapes cannot be compared.
"""

RELATED: tuple[Kinship, ...] = ("whole", "scaled", "rows", "slice", "sum")

LEAST_TOLERANCE = 1e-9
ROUNDING = 200.0
"""Values are equal if they differ by at most this many eps of the largest, or by the least."""


@dataclass(frozen=True)
class Deal:
    """How the ranks share the whole batch. ``rows``: for each rank, the positions of its examples
    among those of the one rank. ``eps``: of the least precise dtype in which the step computes.
    ``scale``: the largest element of the gradients; what is smaller by far is rounding.
    """

    rows: tuple[tuple[int, ...], ...]
    examples: int
    eps: float = torch.finfo(torch.float64).eps
    scale: float = 0.0

    @property
    def world_size(self) -> int:
        return len(self.rows)

    def factors(self) -> Iterator[tuple[float, ...]]:
        """What a value of each rank may be multiplied with, if its step is right: nothing, the
        world size, the rank's share of the examples, or one divided by these.
        """
        world_size = self.world_size
        shares = [len(rows) / self.examples for rows in self.rows]
        found = [
            (1.0,) * world_size,
            (float(world_size),) * world_size,
            (1 / world_size,) * world_size,
        ]
        if all(shares):
            found += [
                tuple(shares),
                tuple(1 / share for share in shares),
                tuple(world_size * share for share in shares),
                tuple(1 / (world_size * share) for share in shares),
            ]
        yield from dict.fromkeys(found)


def kinship(by_rank: Sequence[Value], alone: Value, deal: Deal) -> Kinship:
    """How the values of the ranks are related to that of one rank alone."""
    whole = alone.tensor
    parts = [one.tensor for one in by_rank]
    if not all(bool(one.isfinite().all()) for one in (whole, *parts)):
        return "unknown"
    close = _Close.of([whole, *parts], deal)
    factors = list(deal.factors()) if alone.is_floating_point else [(1.0,) * deal.world_size]
    rows = _rows_of_ranks(parts, whole, deal)
    if all(part.shape == whole.shape for part in parts):
        if _is_whole(parts, whole, factors[:1], close):
            return "whole"
        if _is_whole(parts, whole, factors, close):
            return "scaled"
        if _is_sum(parts, whole, factors, close):
            return "sum"
        if _is_gathered(parts, whole, deal, factors, close):
            return "rows"
        return "rows" if rows is not None and _is_whole(parts, rows, factors, close) else "other"
    if rows is not None:
        return "rows" if _is_whole(parts, rows, factors, close) else "other"
    slices = _slices(parts, whole)
    if slices is not None:
        return "slice" if _is_whole(parts, slices, factors, close) else "other"
    return "unknown"


@dataclass(frozen=True)
class _Close:
    """Whether two tensors are equal up to rounding."""

    most: float

    @classmethod
    def of(cls, tensors: Sequence[Tensor], deal: Deal) -> _Close:
        largest = max((float(one.abs().max()) for one in tensors if one.numel()), default=0.0)
        tolerance = max(LEAST_TOLERANCE, ROUNDING * deal.eps)
        return cls(max(tolerance * largest, ROUNDING * deal.eps * deal.scale))

    def __call__(self, one: Tensor, other: Tensor) -> bool:
        return not one.numel() or float((one - other).abs().max()) <= self.most


def _is_whole(
    parts: Sequence[Tensor],
    wholes: Tensor | Sequence[Tensor],
    factors: Sequence[tuple[float, ...]],
    close: _Close,
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
    parts: Sequence[Tensor], whole: Tensor, factors: Sequence[tuple[float, ...]], close: _Close
) -> bool:
    """True if the values of the ranks, times their factors, add up to ``whole``."""
    stacked = torch.stack(list(parts))
    return any(
        close(torch.tensordot(torch.tensor(one, dtype=torch.float64), stacked, 1), whole)
        for one in factors
    )


def _is_gathered(
    parts: Sequence[Tensor],
    whole: Tensor,
    deal: Deal,
    factors: Sequence[tuple[float, ...]],
    close: _Close,
) -> bool:
    """True if each rank has all rows, in the order in which the ranks were dealt them."""
    order = list(chain.from_iterable(deal.rows))
    everything = list(range(deal.examples))
    if order == everything or sorted(order) != everything:
        return False
    dims = [dim for dim, size in enumerate(whole.shape) if size and size % deal.examples == 0]
    if not dims:
        return False
    return any(
        _is_whole(parts, chosen, factors, close) for chosen in _chosen(whole, dims, order, deal)
    )


def _rows_of_ranks(parts: Sequence[Tensor], whole: Tensor, deal: Deal) -> list[Tensor] | None:
    """For each rank, those rows of ``whole`` that belong to its examples.

    Of the two orders in which several rows may belong to an example it is the one that fits rank 0
    better. None if the shapes are not those of such rows.
    """
    dims = _row_dims(parts, whole, deal)
    if not dims:
        return None
    first = list(_chosen(whole, dims, deal.rows[0], deal))
    errors = [float((one - parts[0]).abs().sum()) for one in first]
    best = errors.index(min(errors))
    return [list(_chosen(whole, dims, rows, deal))[best] for rows in deal.rows]


def _row_dims(parts: Sequence[Tensor], whole: Tensor, deal: Deal) -> list[int]:
    """The dims along which each rank has only the rows of its own examples; [] if there are none,
    or if any other dim has another size.
    """
    dims = []
    for dim, size in enumerate(whole.shape):
        each = size // deal.examples if size % deal.examples == 0 else 0
        if any(part.ndim != whole.ndim for part in parts):
            return []
        sizes = [part.shape[dim] for part in parts]
        if each and sizes == [each * len(rows) for rows in deal.rows]:
            dims.append(dim)
        elif any(one != size for one in sizes):
            return []
    return dims


def _chosen(
    whole: Tensor, dims: Sequence[int], rows: Sequence[int], deal: Deal
) -> Iterator[Tensor]:
    """The rows of these examples: each example's rows side by side, or one of each in turn."""
    for side_by_side in (True, False):
        chosen = whole
        for dim in dims:
            each = whole.shape[dim] // deal.examples
            if side_by_side:
                index = [row * each + number for row in rows for number in range(each)]
            else:
                index = [number * deal.examples + row for number in range(each) for row in rows]
            chosen = chosen.index_select(dim, torch.tensor(index, dtype=torch.long))
        yield chosen


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
