"""Deals the batch: the examples that a rank is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import batches_of_steps
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.shards import OWN, split


def given_to(
    rank: int, case: Case, whole: Any, sizes: Sequence[int], *, undivided: bool, together: bool
) -> list[Any]:
    """The examples that a rank is given, on the CPU: of every step, or of all steps together.

    ``whole``: the batch of all steps, which have ``sizes`` examples each. ``undivided``: the rank
    gets the whole batch, as it does with ``shards="own"``. ``together``: it gets the examples of
    all steps at once.
    """
    if undivided or case.shards == OWN:
        return [whole] if together else batches_of_steps(case, whole, sizes)
    own = [split(case.shards, size, case.ranks.world_size).indices[rank] for size in sizes]
    if together:
        starts = [sum(sizes[:step]) for step in range(len(sizes))]
        of_all_steps = [
            start + index for start, indices in zip(starts, own, strict=True) for index in indices
        ]
        return [take(whole, of_all_steps, case.batch_dims)]
    return [
        take(batch, indices, case.batch_dims)
        for batch, indices in zip(batches_of_steps(case, whole, sizes), own, strict=True)
    ]
