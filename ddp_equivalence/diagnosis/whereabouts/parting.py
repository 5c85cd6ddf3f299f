"""Finds the operations at which the ranks of a step part from one rank with the whole batch.

The step itself is the second implementation here, so nobody has to write one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_equivalence.diagnosis.whereabouts.beside_the_loss import VIEWS
from ddp_equivalence.diagnosis.whereabouts.kinship import RELATED
from ddp_equivalence.diagnosis.whereabouts.selections import Selection
from ddp_equivalence.diagnosis.whereabouts.two_logs import PACKING, TwoLogs
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.operation_log import BETWEEN_TWO, UNWRITTEN
from ddp_equivalence.measurement.operations import Operation, Value

READ_BY_PYTHON = ("_local_scalar_dense", "is_nonzero")
"""The operations behind ``item()`` and ``if``."""


@dataclass(frozen=True)
class Parting:
    """One operation at which the ranks part from one rank: all that it was given is related to what
    one rank has there, and its result is not.

    ``operation``: as it ran on one rank. ``by_rank``, ``alone``: its result; empty and None if only
    the ranks run it. ``is_certain``: the result made a gradient wrong. ``parts_of_sums``: the lines
    that made what it was given, where this is only a part of a sum, or a multiple. ``is_first``: it
    ran before the first backward pass. ``taken``, ``elsewhere``: it has these parts of what one
    rank has, where the other values that it meets are of those parts.
    """

    operation: Operation
    by_rank: tuple[Value, ...]
    alone: Value | None
    is_certain: bool
    parts_of_sums: tuple[CodeLine, ...] = ()
    is_first: bool = False
    taken: Selection | None = None
    elsewhere: Selection | None = None


def partings(logs: TwoLogs) -> tuple[Parting, ...]:
    """The operations at which the ranks part from one rank, the certain ones first.

    Certain are those that made a gradient wrong: from their result to a gradient there is nothing
    but results that one rank does not have either; or they are differentiated. What is made of the
    others cannot be followed, since the step has read them into numbers of Python.
    """
    wrong = [name for name, number in logs.alone.left.items() if logs.is_wrong(name, number)]
    if not wrong:
        return ()
    search = _Search(logs)
    leading, only_ranks = search.leading_to(wrong)
    certain = sorted({*leading, *search.differentiated()})
    first = certain[0] if certain else len(logs.alone.operations)
    others = [number for number in search.read_by_python() if number < first]
    found = [
        *(search.parting(number, is_certain=True) for number in certain),
        *(search.parting(number, is_certain=False) for number in others[:1]),
    ]
    if any(one.is_certain for one in found):
        return tuple(found)
    return (*(Parting(one, (), None, is_certain=True) for one in only_ranks), *found)


class _Search:
    def __init__(self, logs: TwoLogs) -> None:
        self._logs = logs
        self._operations = logs.alone.operations

    def leading_to(self, wrong: Sequence[str]) -> tuple[set[int], list[Operation]]:
        """The partings from which nothing but other results leads to one of these gradients, and
        the operations that only ranks run whose results lead there, the last ones of each rank.
        """
        found: set[int] = set()
        only_ranks: dict[CodeLine, Operation] = {}
        for of_rank, partners in zip(self._logs.ranks, self._logs.partners, strict=True):
            on_one_rank = {partner: number for number, partner in partners.items()}
            # Each with whether the operation that reads it is one that one rank runs as well.
            open_ones = [(of_rank.results[name], True) for name in wrong if name in of_rank.results]
            seen: set[int] = set()
            while open_ones:
                here, is_read_by_both = open_ones.pop()
                number = on_one_rank.get(here)
                operation = of_rank.operations[here]
                if here in seen or (number is not None and self._logs.result(number) in RELATED):
                    continue
                seen.add(here)
                if number is not None and self._is_parting(number):
                    found.add(number)
                makes_values = operation.name not in (*UNWRITTEN, *BETWEEN_TWO)
                written = None if number is None else self._logs.number_after(number)
                if written is not None and written in partners:
                    open_ones.append((partners[written], True))
                if number is None and is_read_by_both and makes_values and operation.line:
                    only_ranks.setdefault(operation.line, operation)
                open_ones.extend((one, number is not None) for one in operation.after)
        return found, list(only_ranks.values())

    def differentiated(self) -> Iterator[int]:
        """The partings in the forward pass, if what they compute is differentiated."""
        for number in self.lasting():
            if self._operations[number].differentiable:
                yield number

    def lasting(self) -> Iterator[int]:
        """The partings outside of backward passes after which not all is right again."""
        for number, operation in enumerate(self._operations):
            if not operation.in_backward and self._is_parting(number):
                after = [self._logs.result(one) for one in self._readers(number)]
                if not after or any(result not in RELATED for result in after):
                    yield number

    def read_by_python(self) -> Iterator[int]:
        """The partings whose results are sent to other ranks or read into numbers of Python."""
        for number in self.lasting():
            if self._operations[number].draws:
                continue  # each rank is seeded with its own number
            open_ones, seen = [number], set[int]()
            while open_ones:
                here = open_ones.pop()
                operation = self._operations[here]
                if operation.talks or operation.name in READ_BY_PYTHON:
                    yield number
                    break
                open_ones.extend(one for one in self._logs.readers(here) if one not in seen)
                seen.update(self._logs.readers(here))

    def _readers(self, number: int) -> Iterator[int]:
        """The operations that use the values that this one wrote."""
        for reader in self._logs.readers(number):
            operation = self._operations[reader]
            if not operation.in_backward and not operation.name.endswith("_like"):
                yield reader

    def parting(self, number: int, *, is_certain: bool) -> Parting:
        place = self._logs.places_that_part(number)[0]
        by_rank, alone = self._logs.returned(number, place)
        operation = self._operations[number]
        parts = tuple(dict.fromkeys(self._lines_of_parts(number, operation.line)))
        backward = (n for n, one in enumerate(self._operations) if one.in_backward)
        return Parting(
            operation,
            by_rank,
            alone,
            is_certain,
            parts,
            number < next(backward, 0),
            *self._logs.taken(by_rank, alone),
        )

    def _lines_of_parts(self, number: int, line: CodeLine | None) -> Iterator[CodeLine]:
        """The other lines that made parts of sums, or multiples, of which this makes its result."""
        for given, writer in self._logs.given(number):
            if given not in ("sum", "scaled") or writer is None:
                continue
            if writer.line != line and writer.line is not None:
                yield writer.line
            elif writer.line == line:
                before = self._logs.number_of(writer)
                if before is not None and before < number:
                    yield from self._lines_of_parts(before, line)

    def _is_parting(self, number: int) -> bool:
        """True if the result is another one, and nothing is that the operation was given.

        What no operation wrote was made of numbers of Python, by this line as far as is known.
        """
        return bool(self._logs.places_that_part(number)) and not self._is_given_others(number)

    def _is_given_others(self, number: int) -> bool:
        """True if one of the values that the operation was given is another one, or is a view of
        one, or a tensor with one in it, that cannot be compared itself.
        """
        open_ones, seen = [number], {number}
        while open_ones:
            for given, writer in self._logs.given(open_ones.pop()):
                if given == "other" and writer is not None:
                    return True
                if given != "unknown" or writer is None or writer.name not in (*VIEWS, *PACKING):
                    continue
                before = self._logs.number_of(writer)
                if before is not None and before not in seen:
                    seen.add(before)
                    open_ones.append(before)
        return False
