"""Finds the operations at which the ranks of a step part from one rank with the whole batch.

The step itself is the second implementation here, so nobody has to write one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ddp_equivalence.diagnosis.whereabouts.kinship import Deal, Kinship, kinship
from ddp_equivalence.measurement.one_rank import OneRank
from ddp_equivalence.measurement.operations import Operation, Operations, Value


@dataclass(frozen=True)
class Parting:
    """One operation at which the ranks part from one rank: all that it was given is related to what
    one rank has there, and its result is not.

    ``operation``: as it ran on one rank. ``by_rank``, ``alone``: its result. ``leads_to_gradient``:
    a gradient was computed from the result; otherwise it belongs to the forward pass, and the
    gradients are those of what it computes.
    """

    operation: Operation
    by_rank: tuple[Value, ...]
    alone: Value
    leads_to_gradient: bool


def partings(runs: OneRank, deal: Deal) -> tuple[Parting, ...]:
    """The operations at which the ranks part from one rank, in their order.

    Only those count that made a gradient wrong: from their result to a gradient there is nothing
    but results that one rank does not have either; or they are differentiated.
    """
    both = _Both(runs, deal)
    wrong = [name for name, number in runs.alone.left.items() if both.is_wrong(name, number)]
    if not wrong:
        return ()
    leading = both.leading_to(wrong)
    numbers = sorted({*leading, *both.differentiated()})
    return tuple(both.parting(number, number in leading) for number in numbers)


class _Both:
    """The operations of the ranks beside those of one rank."""

    def __init__(self, runs: OneRank, deal: Deal) -> None:
        self._alone = runs.alone
        self._ranks = [runs.by_rank[rank] for rank in sorted(runs.by_rank)]
        self._deal = deal
        self._kinship = cache(self._kinship_of)
        self._partners = list(_partners(self._alone, self._ranks))

    def leading_to(self, wrong: Sequence[str]) -> set[int]:
        """The partings from which nothing but other results leads to one of these gradients."""
        found: set[int] = set()
        for of_rank, partners in zip(self._ranks, self._partners, strict=True):
            on_one_rank = {partner: number for number, partner in partners.items()}
            open_ones = [of_rank.results[name] for name in wrong if name in of_rank.results]
            seen: set[int] = set()
            while open_ones:
                here = open_ones.pop()
                if here in seen:
                    continue
                seen.add(here)
                number = on_one_rank.get(here)
                if number is not None and self._result(number) == "related":
                    continue
                if number is not None and self._is_parting(number):
                    found.add(number)
                open_ones.extend(of_rank.operations[here].after)
        return found

    def differentiated(self) -> Iterator[int]:
        """The partings in the forward pass, if what they compute is differentiated."""
        for number, operation in enumerate(self._alone.operations):
            if operation.differentiable and not operation.in_backward and self._is_parting(number):
                yield number

    def parting(self, number: int, leads_to_gradient: bool) -> Parting:
        place = self._places_that_part(number)[0]
        values, alone = self._returned(number, place)
        by_rank = [
            of_rank.values[one]
            for of_rank, one in zip(self._ranks, values, strict=True)
            if one is not None
        ]
        operation = self._alone.operations[number]
        return Parting(operation, tuple(by_rank), self._alone.values[alone or 0], leads_to_gradient)

    def is_wrong(self, name: str, number: int) -> bool:
        """True if the ranks hold another gradient than one rank does; ``number``: its value."""
        return self._kinship(tuple(one.left.get(name) for one in self._ranks), number) == "other"

    def _result(self, number: int) -> Kinship:
        """How the results of the operation on all ranks are related to that on one rank."""
        if self._places_that_part(number):
            return "other"
        places = range(len(self._alone.operations[number].returned))
        known = [self._kinship(*self._returned(number, place)) for place in places]
        return "related" if known and "unknown" not in known else "unknown"

    def _is_parting(self, number: int) -> bool:
        """True if the result is another one, and nothing is that the operation was given."""
        if not self._places_that_part(number):
            return False
        each = self._on_ranks(number)
        return not any(
            self._kinship(tuple(one.given[place] for one in each), alone) == "other"
            for place, alone in enumerate(self._alone.operations[number].given)
        )

    def _places_that_part(self, number: int) -> list[int]:
        places = range(len(self._alone.operations[number].returned))
        return [
            place for place in places if self._kinship(*self._returned(number, place)) == "other"
        ]

    def _returned(self, number: int, place: int) -> tuple[tuple[int | None, ...], int | None]:
        values = tuple(one.returned[place] for one in self._on_ranks(number))
        return values, self._alone.operations[number].returned[place]

    def _on_ranks(self, number: int) -> list[Operation]:
        """The operation on the ranks that have it."""
        return [
            of_rank.operations[partners[number]]
            for of_rank, partners in zip(self._ranks, self._partners, strict=True)
            if number in partners
        ]

    def _kinship_of(self, by_rank: tuple[int | None, ...], alone: int | None) -> Kinship:
        if alone is None or None in by_rank or len(by_rank) < len(self._ranks):
            return "unknown"
        values = [
            of_rank.values[number]
            for of_rank, number in zip(self._ranks, by_rank, strict=True)
            if number is not None
        ]
        return kinship(values, self._alone.values[alone], self._deal)


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
