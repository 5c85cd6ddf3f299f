"""How often each gradient went into a sum over the same ranks, as far as Python's calls show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CollectiveCall, Contents, Kind


@dataclass(frozen=True)
class Repeated:
    """A gradient that was added up among the same ranks more than once.

    ``counts``: for each backward pass that computed a part of it, how many times as often this
    part counts as after one sum. ``calls``: the collectives that add it up, on one rank, in order.
    """

    name: str
    counts: tuple[int, ...]
    calls: tuple[Call, ...]


def sums_repeated(view: View) -> Mapping[str, Repeated]:
    """Parameter -> how its gradient was added up again, if that is the same on every rank.

    A gradient counts only if whole gradients, and nothing else, went into the collectives.
    """
    if not view.observed.covers_every_rank or view.world_size == 1:
        return {}
    by_rank = [_of_rank(view, rank) for rank in range(view.world_size)]
    first = by_rank[0]
    return {
        name: one
        for name, one in first.items()
        if all(name in other and other[name].counts == one.counts for other in by_rank)
    }


def _of_rank(view: View, rank: int) -> dict[str, Repeated]:
    backwards = 0
    groups: dict[str, dict[int, Counter[frozenset[int]]]] = {}
    made: dict[str, list[Call]] = {}
    for call in view.observed.calls.of(rank):
        backwards += call.kind is Kind.BACKWARD
        if call.change is not None and call.change.cleared and backwards:
            for name in call.change.names:
                groups.pop(name, None)
                made.pop(name, None)
        collective = call.collective
        if collective is None or not backwards or not adds_whole_gradients(view, collective):
            continue
        for name in collective.names:
            of_name = groups.setdefault(name, {})
            made.setdefault(name, []).append(call)
            for number in range(backwards):
                of_name.setdefault(number, Counter())[frozenset(collective.ranks)] += 1
    found = {}
    for name, of_name in groups.items():
        counts = tuple(
            prod(len(group) ** (times - 1) for group, times in of_name[number].items())
            if number in of_name
            else 0
            for number in range(backwards)
        )
        if max(counts, default=0) > 1:
            found[name] = Repeated(name, counts, tuple(made[name]))
    return found


def adds_whole_gradients(view: View, collective: CollectiveCall) -> bool:
    """True if a collective adds up gradients in place, each of them with all of its elements."""
    known = set(collective.names) <= set(view.parameters.names)
    return (
        collective.op == "all_reduce"
        and collective.reduce_op == "SUM"
        and collective.contents is Contents.GRADIENTS
        and len(collective.ranks) > 1
        and known
        and collective.elements == view.parameters.total_of(collective.names)
    )


def sum_is_right(view: View) -> bool:
    """True if the ranks were seen to compute gradients whose sum is that of the big batch."""
    if view.observed_gradients is None or not bool(view.expected.any()):
        return False
    return nearly_equal(view.local_gradients[0].sum(0), view.expected)
