"""The order in which the steps of a trainer read the examples, as its ranks were seen to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_equivalence.measurement.observation import Observation


def order_read(
    observed: Mapping[int, Observation], sizes: Sequence[int], ranks: int
) -> tuple[int, ...]:
    """The examples of the batch in the order in which the steps read them, step after step.

    Within a step they are sorted. () if it is not known, if it is the order of the batch, or if the
    steps do not read each example once, as many in each step as the big batch has.

    ``sizes``: the number of examples of each step. ``ranks``: how many there are.
    """
    if len(observed) != ranks or len(sizes) < 2:
        return ()
    order: list[int] = []
    for step, size in enumerate(sizes):
        read: list[int] = []
        for seen in observed.values():
            parts = seen.rows_read(step)
            if parts is None:
                return ()
            rows = {one.candidates: one for part in parts for one in part}.values()
            for one in rows:
                if not one.is_certain:
                    return ()
                read += one.if_certain
        if len(read) != size or len(set(read)) != size:
            return ()
        order += sorted(read)
    if sorted(order) != list(range(sum(sizes))) or order == sorted(order):
        return ()
    return tuple(order)
