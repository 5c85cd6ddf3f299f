"""The rows that a step says it reads, by ``rank.read(indices)``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any

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
        numbers = [_whole(one) for one in indices]
        wrong = next((one for one in numbers if not 0 <= one < count), None)
        if wrong is not None:
            raise ValueError(
                f"rank.read was given {wrong}; the batch of this step has {count} examples, "
                f"so positions are 0 to {count - 1}"
            )
        self._now = RowsRead(tuple((self._given[one],) for one in numbers))


def _whole(one: Any) -> int:
    value = one.item() if getattr(one, "ndim", None) == 0 else one
    if isinstance(value, bool):
        raise TypeError("rank.read was given a mask; it takes positions, as mask.nonzero()[:, 0]")
    try:
        return index(value)
    except TypeError:
        raise TypeError(
            f"rank.read was given {one!r}; it takes the positions of examples, whole numbers in "
            "one dimension"
        ) from None
