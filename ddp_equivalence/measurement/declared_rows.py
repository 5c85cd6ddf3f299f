"""The rows that a step says it reads, by ``rank.read(indices)``."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddp_equivalence.case.numbers import whole_number
from ddp_equivalence.measurement.observation import Indices, RowsRead
from ddp_equivalence.ranks import rank


class DeclaredRows:
    """``positions``: for everything that the rank is given, one after the other, the places of its
    examples in the big batch.
    """

    def __init__(self, positions: Sequence[Indices]) -> None:
        self._positions = positions
        self._given: Indices = ()
        self._now: RowsRead | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside the block."""
        rank.heard_by.append(self._read)
        try:
            yield
        finally:
            rank.heard_by.remove(self._read)

    def begin(self, number: int) -> None:
        """The rank is given the examples with this number, of which nothing has been said."""
        self._given, self._now = self._positions[number], None

    def or_recognised(self, rows: RowsRead | None) -> RowsRead | None:
        """The rows of a call of the model; ``rows``: those that were recognised in its arguments.

        These count if each of them can be one example only.
        """
        if self._now is None or (rows is not None and rows.is_certain):
            return rows
        return self._now

    def _read(self, indices: Any) -> None:
        count = len(self._given)
        listed = indices.tolist() if hasattr(indices, "tolist") else indices
        numbers = [whole_number(one) for one in listed] if isinstance(listed, Iterable) else [None]
        known = [one for one in numbers if one is not None]
        if len(known) < len(numbers):
            raise TypeError(
                f"rank.read was given {reprlib.repr(indices)}; it takes the positions of examples, "
                "whole numbers in one dimension (those of a mask are mask.nonzero()[:, 0])"
            )
        wrong = next((one for one in known if not 0 <= one < count), None)
        if wrong is not None:
            raise ValueError(
                f"rank.read was given {wrong}; it takes positions, counted from 0, in the batch of "
                f"this step, which has {count} examples"
            )
        self._now = RowsRead(tuple((self._given[one],) for one in known), declared=True)
