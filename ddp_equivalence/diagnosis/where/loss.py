"""The numbers by which a loss was multiplied or divided, and the operations that made them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ddp_equivalence.measurement.calls import CodeLine, Operation, Operations

READ_BY_PYTHON = "_local_scalar_dense"
"""The operation behind ``item()``."""

DIVIDING = ("div", "div_")
SCALING = (*DIVIDING, "mul", "mul_")

MOST_LOOKED_AT = 400
"""So many operations behind the loss are looked at, the nearest first."""

WHOLE = 1e-6
"""A number that is no further from a whole one is a whole one."""

MOST_NUMBERS = 16
"""Longer tensors are not looked through for a number that Python has read."""


@dataclass(frozen=True)
class Scaling:
    """``line`` multiplied or divided what became the loss by ``number``. ``made_at``: the lines
    that made the number of others, the last ones first; () if no operation of torch did.
    """

    line: CodeLine
    divides: bool
    number: float
    made_at: tuple[CodeLine, ...]

    def explains(self, factor: float) -> bool:
        """True if both this number and the right one are counts, where the loss is so many times
        what it should be.
        """
        right = self.number * factor if self.divides else self.number / factor
        return _is_count(self.number) and _is_count(right)


def scalings_of_loss(run: Operations) -> list[Scaling]:
    """By which numbers the loss of the first backward pass was scaled, the last ones first."""
    loss = next(losses_of(run), None)
    found: list[Scaling] = []
    open_ones, seen = deque([] if loss is None else [loss]), set[int]()
    while open_ones and len(seen) < MOST_LOOKED_AT:
        number = open_ones.popleft()
        operation = run.operations[number]
        if number in seen or not operation.differentiable:
            continue
        seen.add(number)
        if operation.name in SCALING and operation.line is not None:
            found += _scalings(run, number, operation, operation.line)
        open_ones.extend(sorted(operation.after, reverse=True))
    return found


def loss_on_one_rank(run: Operations) -> float | None:
    """The sum of the losses at which all backward passes began; None if one is not known."""
    total = 0.0
    for loss in losses_of(run):
        returned = run.operations[loss].returned if loss is not None else ()
        value = returned[0] if returned else None
        if value is None or run.values[value].tensor.numel() != 1:
            return None
        total += float(run.values[value].tensor)
    return total


def losses_of(run: Operations) -> Iterator[int | None]:
    """The operations that made the losses at which backward passes began."""
    for number, operation in enumerate(run.operations):
        if operation.in_backward and number and not run.operations[number - 1].in_backward:
            before = run.operations[number - 1]
            if before.name == "ones_like":
                yield before.writers[0]
            else:
                yield number - 1 if before.differentiable else None


def _scalings(
    run: Operations, number: int, operation: Operation, line: CodeLine
) -> Iterator[Scaling]:
    divides = operation.name in DIVIDING
    for by in operation.numbers[:1]:
        read = _read_as(run, by, number)
        yield Scaling(line, divides, by, _lines_behind(run, read, by))
    for value, writer in list(zip(operation.given, operation.writers, strict=True))[1:]:
        if value is None or (writer is not None and run.operations[writer].differentiable):
            continue
        elements = run.values[value].tensor
        if elements.numel() == 1:
            yield Scaling(
                line, divides, float(elements), _lines_behind(run, writer, float(elements))
            )


def _read_as(run: Operations, number: float, before: int) -> int | None:
    """The operation that made what Python last read as this number before."""
    for operation in reversed(run.operations[:before]):
        if operation.name == READ_BY_PYTHON:
            read = next((one for one in operation.given if one is not None), None)
            if read is not None and bool((run.values[read].tensor == number).all()):
                return operation.writers[operation.given.index(read)]
    return None


def _lines_behind(run: Operations, writer: int | None, number: float) -> tuple[CodeLine, ...]:
    """The lines whose operations returned this number, and were not given it."""
    found: dict[CodeLine, int] = {}
    open_ones, seen = [] if writer is None else [writer], set[int]()
    while open_ones and len(seen) < MOST_LOOKED_AT:
        place = open_ones.pop()
        operation = run.operations[place]
        if place in seen or not _times(run, operation.returned, number):
            continue
        seen.add(place)
        pairs = zip(operation.given, operation.writers, strict=True)
        given = [value for value, writer in pairs if writer is not None]
        times = _times(run, given, number)
        if operation.line is not None and not times:
            found[operation.line] = max(place, found.get(operation.line, place))
        if times <= 1:  # of several equal numbers it is not known which one is meant
            open_ones.extend(operation.after)
    return tuple(sorted(found, key=lambda line: found[line], reverse=True))


def _times(run: Operations, values: Sequence[int | None], number: float) -> int:
    """How many elements of these values are this number."""
    known = [run.values[one] for one in values if one is not None]
    small = [one.tensor for one in known if prod(one.shape) <= MOST_NUMBERS]
    return sum(int((one == number).sum()) for one in small)


def _is_count(number: float) -> bool:
    return number > 0 and abs(number - round(number)) <= WHOLE * number


def is_left_by_backward(run: Operations) -> bool:
    """True if all gradients that the step leaves are what an operation of backward returned."""
    made = {one for op in run.operations if op.in_backward for one in op.returned}
    return made.issuperset(run.left.values())


def behind(run: Operations, results: Iterable[int]) -> set[int]:
    """All operations on which these depend, with these."""
    open_ones, seen = list(results), set[int]()
    while open_ones:
        number = open_ones.pop()
        if number not in seen:
            seen.add(number)
            open_ones.extend(run.operations[number].after)
    return seen
