"""Pairwise selection: few tests in which every pair of values meets that meets in any test.

Most faults of programs need one value or two that come together (Kuhn, Wallace and Gallo, "Software
Fault Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004). The known tools
make up new combinations; here the tests are given, and few of them are chosen.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs_of(factors: Mapping[str, object]) -> frozenset[Pair]:
    """All pairs of a test's values. ``factors``: name of a factor -> its value in the test."""
    return frozenset(combinations(sorted(factors.items(), key=lambda factor: factor[0]), 2))


def covering(tests: Sequence[Mapping[str, object]], costs: Sequence[float] = ()) -> list[int]:
    """The numbers of tests that have every pair of values that any of them has.

    Each is the one that adds most pairs for its cost to those before it, and the first of several.
    In the end those are dropped whose pairs all have others. So the choice is cheap, though not
    always the cheapest, and it is the same whenever the tests are. ``costs``: all alike if empty.
    """
    pairs = [pairs_of(test) for test in tests]
    costs = costs or [1.0] * len(tests)
    left = set[Pair]().union(*pairs)
    best_first = [(-len(one) / costs[number], number) for number, one in enumerate(pairs)]
    heapq.heapify(best_first)
    chosen = []
    while left:
        _, number = heapq.heappop(best_first)
        adds = -len(pairs[number] & left) / costs[number]
        if best_first and (adds, number) > best_first[0]:
            heapq.heappush(best_first, (adds, number))
            continue
        chosen.append(number)
        left -= pairs[number]
    return sorted(_needed(chosen, pairs, costs))


def _needed(
    chosen: Sequence[int], pairs: Sequence[frozenset[Pair]], costs: Sequence[float]
) -> list[int]:
    """The chosen ones without those that others make superfluous, the dearest first."""
    times = Counter(pair for number in chosen for pair in pairs[number])
    needed = list(chosen)
    for number in sorted(chosen, key=lambda one: (-costs[one], one)):
        if all(times[pair] > 1 for pair in pairs[number]):
            needed.remove(number)
            times.subtract(pairs[number])
    return needed
