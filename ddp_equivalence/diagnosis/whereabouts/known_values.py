"""Tells whether a value is among those that the loss of the case computes, in any arrangement.

Values are compared by their lengths and by two fixed random projections of their directions, so
that looking one up takes no longer if many are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cache
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from ddp_equivalence.measurement.operations import Value

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
            keys = tuple(self._keys(rows))
            if dim and not is_varied:
                self._slices.setdefault((dim, rows.shape[1]), []).append(keys)
                continue
            self._rows.setdefault(rows.shape[1], set()).update(keys)
            if 1 < len(keys) <= MOST_ROWS:
                self._each.setdefault(rows.shape[1], []).append(frozenset(keys) - {ZERO})
        self._rows.setdefault(tensor.numel(), set()).update(self._keys(tensor.reshape(1, -1)))

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
        if all(_is_near(key, self._rows.get(tensor.numel(), ())) for key in self._keys(flat)):
            return "yes"  # one row of a known value
        looked_up, is_varied = False, _is_varied(tensor)
        for dim, rows in _rows(tensor, value):
            looked_up = True
            keys = tuple(self._keys(rows[:MOST_ROWS]))
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

    def _keys(self, rows: Tensor) -> Iterator[Key]:
        """The key of each row."""
        lengths = rows.norm(dim=1, keepdim=True)
        directions = rows / lengths.clamp(min=torch.finfo(torch.float64).tiny)
        projected = torch.cat([lengths.log(), directions @ _projections(rows.shape[1])], 1)
        for length, key in zip(lengths, projected / self._step, strict=True):
            yield tuple(key.round().long().tolist()) if float(length) > 0 else ZERO


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
