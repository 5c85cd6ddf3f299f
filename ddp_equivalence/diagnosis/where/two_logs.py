"""The operations of a step on its ranks, beside those of the same step on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from math import prod

from ddp_equivalence.diagnosis.where.relations import (
    MOST_PACKED,
    Related,
    Relation,
    Selection,
    Sharing,
    Values,
    farthest,
    related,
)
from ddp_equivalence.measurement.calls import Operation, Operations, Value
from ddp_equivalence.measurement.measure import OneRank

PACKING = ("stack", "cat")
"""Operations that put several values into one tensor."""

TO_ONE_RANK = "reduce_"

Given = tuple[Related, Operation | None]
"""How a value is related to that on one rank, and the operation that wrote it."""


class TwoLogs:
    """``alone``: what one rank ran; ``ranks``: what each rank ran. Operations are meant by their
    number on one rank. ``partners``: for each rank, that number -> the number on this rank.
    ``rivals``: parts that ranks were seen to take, and those parts with which they do not go
    together.
    """

    def __init__(
        self, runs: OneRank, sharing: Sharing, rivals: Mapping[Selection, Selection] | None = None
    ) -> None:
        self.alone, self._may_own = runs.alone, runs.owned
        self.ranks = [runs.by_rank[rank] for rank in sorted(runs.by_rank)]
        self.partners = list(partners(self.alone, self.ranks))
        self.sharing = sharing
        self._rivals = rivals or {}
        self._related = cache(self._relation_of)
        self._positions = set[int]()
        self._left_out: Collection[int] = ()
        self._number = {id(one): number for number, one in enumerate(self.alone.operations)}
        self._readers: dict[int, list[int]] = {}
        for number, operation in enumerate(self.alone.operations):
            for writer in operation.after:
                self._readers.setdefault(writer, []).append(number)
        self._read_as_numbers = {
            number: link
            for number, operation in enumerate(self.alone.operations)
            if operation.numbers and (link := self._writer_of_numbers(number)) is not None
        }
        for number, writer in self._read_as_numbers.items():
            self._readers.setdefault(writer, []).append(number)
        for number in range(len(self.alone.operations)):  # what an operation reads comes before it
            if self._makes_positions(number):
                self._positions.add(number)

    def without(self, numbers: Collection[int]) -> TwoLogs:
        """The same logs, as if the results of these operations could not be compared."""
        logs = copy(self)
        logs._left_out = numbers
        return logs

    def number_of(self, operation: Operation) -> int | None:
        """The number of an operation that one rank ran; None if only other ranks did."""
        return self._number.get(id(operation))

    def is_wrong(self, name: str, value: int) -> bool:
        """True if the ranks hold another gradient than one rank, whose value has this number."""
        left = tuple(one.left.get(name) for one in self.ranks)
        if None in left and self._may_own:
            return "whole" not in self._of_single_ranks(left, value)
        return self._related(left, value).how == "other"

    def is_part(self, name: str, value: int) -> bool:
        """True if each rank holds a part of one rank's gradient, whose value has this number."""
        return self._related(tuple(one.left.get(name) for one in self.ranks), value).how == "sum"

    @property
    def owned(self) -> bool:
        """True if a gradient that one rank leaves is on some of the ranks only, as it may be."""
        return self._may_own and any(
            name not in one.left for name in self.alone.left for one in self.ranks
        )

    def readers(self, number: int) -> Sequence[int]:
        """The operations that read what this one wrote."""
        return self._readers.get(number, ())

    def makes_whole_numbers(self, number: int) -> bool:
        """True if the first result of the operation is of whole numbers or flags."""
        first = next(iter(self.alone.operations[number].returned), None)
        return first is not None and not self.alone.values[first].is_floating_point

    def result(self, number: int, *, first: bool = False) -> Relation:
        """How the results of the operation on all ranks, or the first of them, are related to that
        on one rank.
        """
        places = self._places(number)[:1] if first else self._places(number)
        each = [self._of_result(number, place) for place in places]
        if "other" in each:
            return "other"
        return "unknown" if not each or "unknown" in each else each[0]

    def places_that_diverge(self, number: int) -> list[int]:
        """Which of the results of the operation are others than on one rank."""
        return [one for one in self._places(number) if self._of_result(number, one) == "other"]

    def returned(self, number: int, place: int) -> tuple[tuple[Value, ...], Value | None]:
        """One result of the operation: by rank, and on one rank."""
        alone = self.alone.operations[number].returned[place]
        by_rank = [
            of_rank.values[value]
            for of_rank, one in zip(self.ranks, self.on_ranks(number), strict=True)
            if (value := one.returned[place]) is not None
        ]
        return tuple(by_rank), None if alone is None else self.alone.values[alone]

    def given(self, number: int) -> Iterator[tuple[Relation, Operation | None]]:
        """How each value that the operation was given is related to that on one rank, and which
        operation wrote it: on one rank or, if none did there, on any of the ranks.
        """
        operation = self.alone.operations[number]
        for relation, writer in self.relations(number):
            # The largest of all counts only where ranks find it.
            is_sent = operation.talks or operation.name in PACKING
            yield "other" if relation.how == "extreme" and not is_sent else relation.how, writer

    def relations(self, number: int) -> Iterator[Given]:
        """As ``given``, with the parts that the ranks have of each value. Nothing if the operation
        does not run on all ranks.
        """
        operation = self.alone.operations[number]
        each = self.on_ranks(number)
        if len(each) < len(self.ranks):
            return
        for place, (alone, writer) in enumerate(
            zip(operation.given, operation.writers, strict=True)
        ):
            relation = self._related(tuple(one.given[place] for one in each), alone)
            if writer is not None:
                if writer in self._left_out:
                    relation = Related("unknown")
                may_be = relation.how in ("other", "extreme")
                found = Related("positions") if may_be and writer in self._positions else relation
                yield found, self.alone.operations[writer]
                continue
            on_ranks = [
                of_rank.operations[on_rank]
                for of_rank, one in zip(self.ranks, each, strict=True)
                if (on_rank := one.writers[place]) is not None
            ]
            yield relation, on_ranks[0] if on_ranks else None
        if number in self._read_as_numbers:
            writer = self._read_as_numbers[number]
            yield Related(self.result(writer)), self.alone.operations[writer]

    def number_after(self, number: int) -> int | None:
        """The operation whose result Python has read and given to this one, as a number."""
        return self._read_as_numbers.get(number)

    def values(self) -> Iterator[Values]:
        """Everything that operations outside of backward passes were given, and returned."""
        for number, operation in enumerate(self.alone.operations):
            each = self.on_ranks(number)
            if operation.in_backward or not each:
                continue
            for place, given in enumerate(operation.given):
                yield from self._compared(given, [one.given[place] for one in each])
            for place, returned in enumerate(operation.returned):
                yield from self._compared(returned, [one.returned[place] for one in each])

    def _compared(self, alone: int | None, by_rank: Sequence[int | None]) -> Iterator[Values]:
        if alone is not None and None not in by_rank:
            yield self._values_of(by_rank), self.alone.values[alone]

    def taken(
        self, by_rank: Sequence[Value], alone: Value | None
    ) -> tuple[Selection | None, Selection | None]:
        """With which selection the ranks have parts of a value, if that is one of the rivals, and
        the one that is used elsewhere.
        """
        for rival, usual in self._rivals.items():
            sharing = replace(self.sharing, others=(*self.sharing.others, rival))
            if alone is not None and rival in related(by_rank, alone, sharing).by:
                return rival, usual
        return None, None

    def apart(
        self, by_rank: Sequence[Value], alone: Value | None
    ) -> tuple[int, float, float] | None:
        """The element of a rank that is farthest from that in its part of what one rank has."""
        return None if alone is None else farthest(by_rank, alone, self.sharing)

    def rivals(self) -> dict[Selection, Selection]:
        """Selections that do not go together with others, which are more frequent.

        An operation was given parts that were taken with both, and its result is another one.
        """
        votes: Counter[Selection] = Counter()
        pairs: list[tuple[Selection, Selection]] = []
        for number, operation in enumerate(self.alone.operations):
            if operation.in_backward or not self.on_ranks(number):
                continue
            given = [relation.by for relation, _ in self.relations(number)]
            votes.update(one for by in given for one in by)
            if self.result(number) == "other":
                pairs += [
                    (one, other)
                    for by in given
                    for one in by
                    for others in given
                    for other in others - by
                    if one.rivals(other)
                ]
        rows = self.sharing.selections[0]
        ordered = [sorted(pair, key=lambda one: (one == rows, votes[one])) for pair in pairs]
        return {one[0]: one[1] for one in ordered}

    def _places(self, number: int) -> range:
        return range(len(self.alone.operations[number].returned))

    def _of_result(self, number: int, place: int) -> Relation:
        if number in self._left_out:
            return "unknown"
        values = tuple(one.returned[place] for one in self.on_ranks(number))
        operation = self.alone.operations[number]
        alone = operation.returned[place]
        how = self._related(values, alone).how
        if operation.name == TO_ONE_RANK:  # to the others it leaves anything
            of_single = self._of_single_ranks(values, alone)
            how = next((one for one in of_single if one in ("whole", "scaled")), how)
        how = "other" if how == "extreme" and not self._is_sent(number) else how
        return "positions" if how == "other" and number in self._positions else how

    def _makes_positions(self, number: int) -> bool:
        """True if an operation makes whole numbers or flags of positions that each rank counts in
        its own part.
        """
        returned = self.alone.operations[number].returned
        made = [self.alone.values[one] for one in returned if one is not None]
        return not any(one.is_floating_point for one in made) and any(
            relation.how == "positions" for relation, _ in self.relations(number)
        )

    def _is_sent(self, number: int) -> bool:
        """True if what the operation returns is only given to other ranks."""
        readers = [self.alone.operations[one] for one in self.readers(number)]
        return bool(readers) and all(one.talks or one.name in PACKING for one in readers)

    def on_ranks(self, number: int) -> list[Operation]:
        """The operation on all ranks; [] if they do not have it."""
        return [
            of_rank.operations[partners[number]]
            for of_rank, partners in zip(self.ranks, self.partners, strict=True)
            if number in partners
        ]

    def _relation_of(self, by_rank: tuple[int | None, ...], alone: int | None) -> Related:
        if alone is None or None in by_rank or len(by_rank) < len(self.ranks):
            return Related("unknown")
        return related(self._values_of(by_rank), self.alone.values[alone], self.sharing)

    def _of_single_ranks(
        self, by_rank: Sequence[int | None], alone: int | None
    ) -> Iterator[Relation]:
        """How the value of each rank alone is related to that of one rank."""
        for of_rank, number in zip(self.ranks, by_rank, strict=True):
            if number is not None and alone is not None:
                everywhere = [of_rank.values[number]] * len(self.ranks)
                yield related(everywhere, self.alone.values[alone], self.sharing).how

    def _values_of(self, by_rank: Sequence[int | None]) -> list[Value]:
        return [
            of_rank.values[number]
            for of_rank, number in zip(self.ranks, by_rank, strict=True)
            if number is not None
        ]

    def _writer_of_numbers(self, number: int) -> int | None:
        """The last operation before this one that left the number by which this one multiplies or
        divides, on one rank and on the others, at the same place of a tensor.

        None if the numbers are the same everywhere, or if no operation did.
        """
        each = self.on_ranks(number)
        alone = self.alone.operations[number].numbers
        if len(each) < len(self.ranks) or all(one.numbers == alone for one in each):
            return None
        if len(alone) != 1 or any(len(one.numbers) != 1 for one in each):
            return None
        for before in range(number - 1, -1, -1):
            operation, partners = self.alone.operations[before], self.on_ranks(before)
            if len(operation.returned) != 1 or len(partners) < len(self.ranks):
                continue
            if operation.returned[0] is None or any(one.returned[0] is None for one in partners):
                continue
            values = self._values_of([one.returned[0] for one in partners])
            lists = [
                one.tensor.flatten().tolist() if prod(one.shape) <= MOST_PACKED else []
                for one in (self.alone.values[operation.returned[0]], *values)
            ]
            wanted = [alone[0], *(one.numbers[0] for one in each)]
            if wanted in [list(one) for one in zip(*lists, strict=False)]:
                return before
        return None


def partners(alone: Operations, ranks: Sequence[Operations]) -> Iterator[Mapping[int, int]]:
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
