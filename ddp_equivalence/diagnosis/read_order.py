"""The order in which the steps of a trainer read the examples, as its ranks were seen to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

from ddp_equivalence.measurement.observation import Observation


def order_read(
    observed: Mapping[int, Observation], sizes: Sequence[int], ranks: int
) -> tuple[int, ...]:
    """The examples of the batch in the order in which the steps read them, step after step.

    Within a step they are sorted. A step that reads fewer examples than its big batch has is given
    the first ones that no step reads. () if it is not known what was read, if it is the order of
    the batch, if a step reads more, or if two steps read the same example.

    ``sizes``: the number of examples of each step. ``ranks``: how many there are.
    """
    if len(observed) != ranks or len(sizes) < 2:
        return ()
    by_step = [_read_in(step, observed.values()) for step in range(len(sizes))]
    known = [read for read in by_step if read is not None]
    if len(known) < len(sizes) or any(
        len(read) > size for read, size in zip(known, sizes, strict=True)
    ):
        return ()
    times = Counter(chain.from_iterable(known))
    if any(count > 1 for count in times.values()) or not times:
        return ()
    unread = iter([one for one in range(sum(sizes)) if one not in times])
    order: list[int] = []
    for read, size in zip(known, sizes, strict=True):
        order += sorted([*read, *islice(unread, size - len(read))])
    return () if order == sorted(order) else tuple(order)


def _read_in(step: int, observed: Iterable[Observation]) -> frozenset[int] | None:
    """The examples that the ranks read in this step; None if one of them is not known."""
    read: set[int] = set()
    for seen in observed:
        parts = seen.rows_read(step)
        if parts is None:
            return None
        for one in {one.candidates: one for part in parts for one in part}.values():
            if not one.is_certain:
                return None
            read |= set(one.if_certain)
    return frozenset(read)
