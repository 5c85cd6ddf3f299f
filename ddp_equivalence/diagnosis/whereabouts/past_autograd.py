"""Collectives in a forward pass of which autograd knows nothing, on the way to wrong gradients."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.whereabouts.two_logs import TwoLogs
from ddp_equivalence.measurement.operations import Operation, Operations


def past_autograd(logs: TwoLogs) -> tuple[Operation, ...]:
    """The collectives outside of backward passes that took what has a gradient, left something
    that was not computed from it as far as autograd knows, and went into a wrong gradient.

    Each line once, in the order in which the first rank ran them.
    """
    wrong = [name for name, number in logs.alone.left.items() if logs.is_wrong(name, number)]
    first = logs.ranks[0]
    found: dict[object, Operation] = {}
    for number in sorted(
        _behind(first, [first.results[one] for one in wrong if one in first.results])
    ):
        operation = first.operations[number]
        if operation.loses_gradient and not operation.in_backward and operation.line is not None:
            found.setdefault(operation.line, operation)
    return tuple(found.values())


def _behind(run: Operations, results: Sequence[int]) -> set[int]:
    """All operations on which these depend."""
    open_ones, seen = list(results), set[int]()
    while open_ones:
        number = open_ones.pop()
        if number not in seen:
            seen.add(number)
            open_ones.extend(run.operations[number].after)
    return seen
