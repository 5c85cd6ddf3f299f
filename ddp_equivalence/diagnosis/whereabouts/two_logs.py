"""The operations of a step on its ranks, beside those of the same step on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from ddp_equivalence.diagnosis.whereabouts.kinship import Deal, Kinship, kinship
from ddp_equivalence.measurement.one_rank import OneRank
from ddp_equivalence.measurement.operations import Operation, Operations, Value


class TwoLogs:
    """``alone``: what one rank ran; ``ranks``: what each rank ran. Operations are meant by their
    number on one rank. ``partners``: for each rank, that number -> the number on this rank.
    """

    def __init__(self, runs: OneRank, deal: Deal) -> None:
        self.alone = runs.alone
        self.ranks = [runs.by_rank[rank] for rank in sorted(runs.by_rank)]
        self.partners = list(_partners(self.alone, self.ranks))
        self._deal = deal
        self._kinship = cache(self._kinship_of)
        self._number = {id(one): number for number, one in enumerate(self.alone.operations)}
        self._readers: dict[int, list[int]] = {}
        for number, operation in enumerate(self.alone.operations):
            for writer in operation.after:
                self._readers.setdefault(writer, []).append(number)

    def number_of(self, operation: Operation) -> int | None:
        """The number of an operation that one rank ran; None if only other ranks did."""
        return self._number.get(id(operation))

    def is_wrong(self, name: str, value: int) -> bool:
        """True if the ranks hold another gradient than one rank, whose value has this number."""
        return self._kinship(tuple(one.left.get(name) for one in self.ranks), value) == "other"

    def readers(self, number: int) -> Sequence[int]:
        """The operations that read what this one wrote."""
        return self._readers.get(number, ())

    def result(self, number: int) -> Kinship:
        """How the results of the operation on all ranks are related to that on one rank."""
        each = [self._of_result(number, place) for place in self._places(number)]
        if "other" in each:
            return "other"
        return "unknown" if not each or "unknown" in each else each[0]

    def places_that_part(self, number: int) -> list[int]:
        """Which of the results of the operation are others than on one rank."""
        return [one for one in self._places(number) if self._of_result(number, one) == "other"]

    def returned(self, number: int, place: int) -> tuple[tuple[Value, ...], Value | None]:
        """One result of the operation: by rank, and on one rank."""
        alone = self.alone.operations[number].returned[place]
        by_rank = [
            of_rank.values[value]
            for of_rank, one in zip(self.ranks, self._on_ranks(number), strict=True)
            if (value := one.returned[place]) is not None
        ]
        return tuple(by_rank), None if alone is None else self.alone.values[alone]

    def given(self, number: int) -> Iterator[tuple[Kinship, Operation | None]]:
        """How each value that the operation was given is related to that on one rank, and which
        operation wrote it: on one rank or, if none did there, on any of the ranks.
        """
        operation = self.alone.operations[number]
        each = self._on_ranks(number)
        for place, (alone, writer) in enumerate(
            zip(operation.given, operation.writers, strict=True)
        ):
            related = self._kinship(tuple(one.given[place] for one in each), alone)
            if writer is not None:
                yield related, self.alone.operations[writer]
                continue
            on_ranks = [
                of_rank.operations[on_rank]
                for of_rank, one in zip(self.ranks, each, strict=True)
                if (on_rank := one.writers[place]) is not None
            ]
            yield related, on_ranks[0] if on_ranks else None

    def _places(self, number: int) -> range:
        return range(len(self.alone.operations[number].returned))

    def _of_result(self, number: int, place: int) -> Kinship:
        values = tuple(one.returned[place] for one in self._on_ranks(number))
        return self._kinship(values, self.alone.operations[number].returned[place])

    def _on_ranks(self, number: int) -> list[Operation]:
        """The operation on the ranks that have it."""
        return [
            of_rank.operations[partners[number]]
            for of_rank, partners in zip(self.ranks, self.partners, strict=True)
            if number in partners
        ]

    def _kinship_of(self, by_rank: tuple[int | None, ...], alone: int | None) -> Kinship:
        if alone is None or None in by_rank or len(by_rank) < len(self.ranks):
            return "unknown"
        values = [
            of_rank.values[number]
            for of_rank, number in zip(self.ranks, by_rank, strict=True)
            if number is not None
        ]
        return kinship(values, self.alone.values[alone], self._deal)


def _partners(alone: Operations, ranks: Sequence[Operations]) -> Iterator[Mapping[int, int]]:
    """For each rank: the number of an operation on one rank -> its number on this rank.

    An operation that a line runs oftener on one rank than on the other has no partner: in a loop of
    another length nothing tells which passes correspond to each other.
    """
    left = _numbers(alone)
    each = [_numbers(one) for one in ranks]
    for right in each:
        yield {
            number: partner
            for key, numbers in left.items()
            if all(len(one.get(key, ())) == len(numbers) for one in each)
            for number, partner in zip(numbers, right[key], strict=True)
        }


def _numbers(operations: Operations) -> dict[tuple[object, ...], list[int]]:
    """The numbers of the operations of one kind that one line runs, in their order."""
    found: dict[tuple[object, ...], list[int]] = {}
    for number, one in enumerate(operations.operations):
        key = one.line, one.name, len(one.given), len(one.returned), one.in_backward
        found.setdefault(key, []).append(number)
    return found
