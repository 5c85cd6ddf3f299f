"""Which examples the ranks read in a step, from the rows that their models were called with.

A row may fit several examples, if these are equal there. It is then assigned to one of them only if
that decides nothing: if the rank read as many such rows as it was given, or if the examples are
equal in every tensor of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_equivalence.diagnosis.example_gradients import PartsByRank
from ddp_equivalence.measurement.observation import Indices, Observation, RowsRead


@dataclass(frozen=True)
class ExamplesRead:
    """The examples that every rank read in one step, as positions in the batch of all steps.

    ``by_rank``: for every rank, the examples of each micro-batch. ``times``: example -> how often
    it, or the part of it that was read most often, was read on all ranks together. ``equal``: the
    examples that equal other ones where they were read.
    """

    by_rank: PartsByRank
    times: Counter[int]
    equal: frozenset[int]


def examples_read(
    observed: Mapping[int, Observation], step: int, dealt: Mapping[int, Indices] | None
) -> ExamplesRead | None:
    """The examples that were read; None if a row fits none, or several that are not equal.

    ``dealt``: those that each rank was given, None if all.
    """
    rows_by_rank = {rank: seen.rows_read(step) for rank, seen in observed.items()}
    if not rows_by_rank or any(rows is None for rows in rows_by_rank.values()):
        return None
    equal = {
        index: frozenset(group)
        for seen in observed.values()
        for group in seen.equal_examples
        for index in group
    }
    resolver = _Resolver(equal)
    by_rank = []
    for rank, micro_batches in sorted(rows_by_rank.items()):
        own = None if dealt is None else frozenset(dealt[rank])
        parts = [resolver.examples_of(passes, own) for passes in micro_batches or ()]
        if any(part is None for part in parts):
            return None
        by_rank.append(tuple(part for part in parts if part is not None))
    return ExamplesRead(tuple(by_rank), resolver.times, frozenset(resolver.equal_read))


class _Resolver:
    """Assigns rows to examples, on all ranks one after the other."""

    def __init__(self, equal: Mapping[int, frozenset[int]]) -> None:
        self._equal = equal
        self._times_of_part: dict[str, Counter[int]] = {}
        self.equal_read: set[int] = set()

    @property
    def times(self) -> Counter[int]:
        """Example -> how often the part of it that was read most often was read."""
        most: Counter[int] = Counter()
        for times in self._times_of_part.values():
            most |= times
        return most

    def examples_of(self, passes: Sequence[RowsRead], own: frozenset[int] | None) -> Indices | None:
        """The examples of one micro-batch; None if they are not certain."""
        examples: list[int] = []
        for rows in passes:
            assigned = self._assigned(rows, own)
            if assigned is None:
                return None
            examples += assigned
        return tuple(examples)

    def _assigned(self, rows: RowsRead, own: frozenset[int] | None) -> list[int] | None:
        taken = self._times_of_part.setdefault(rows.part, Counter())
        counts = Counter(rows.candidates)
        waiting: dict[Indices, list[int]] = {}
        examples = []
        for places in rows.candidates:
            fits = [place for place in places if own is None or place in own]
            if len(fits) < counts[places]:
                fits = list(places)
            if len(places) > 1:
                self.equal_read.update(places)
            if len(fits) > 1 and counts[places] != len(fits) and not self._are_equal(fits):
                return None
            left = waiting.setdefault(places, [])
            if not left:
                left += sorted(fits, key=lambda place: (taken[place], place))
            example = left.pop(0)
            taken[example] += 1
            examples.append(example)
        return examples

    def _are_equal(self, examples: Sequence[int]) -> bool:
        return self._equal.get(examples[0], frozenset()).issuperset(examples)
