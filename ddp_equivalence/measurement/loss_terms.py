"""Finds which parameters each scalar on the way to a loss reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddp_equivalence.measurement.calls import Call

MOST_TERMS = 64
"""So many scalars are followed until backward."""

MOST_NODES = 20_000
"""So many nodes of the graph are visited for one backward pass."""

MOST_BACKWARDS = 8
"""Only the first backward passes of a step are looked into, since the others are like them."""


class LossTerms:
    """``parameters``: id of a parameter -> its name. ``calls``: those of the step."""

    def __init__(self, parameters: Mapping[int, str], calls: list[Call]) -> None:
        self._parameters = parameters
        self._calls = calls
        self._nodes: list[tuple[int, Any]] = []
        self._backwards = 0

    def begin_step(self) -> None:
        """What happens from now on belongs to the next step."""
        self._nodes.clear()
        self._backwards = 0

    def add(self, number: int, node: Any) -> None:
        """The call of this number is a scalar, which this node of the graph made."""
        if len(self._nodes) < MOST_TERMS and self._backwards < MOST_BACKWARDS:
            self._nodes.append((number, node))

    def backward(self) -> None:
        """Backward begins: give the scalars since the last one the names of their parameters.

        A single scalar is the loss itself, which reaches everything.
        """
        self._backwards += 1
        known: dict[Any, frozenset[str]] = {}
        left = MOST_NODES
        for number, node in self._nodes if len(self._nodes) > 1 else ():
            names, visited = self._reached(node, known, left)
            left -= visited
            if left <= 0:
                break
            known[node] = names
            call = self._calls[number]
            self._calls[number] = replace(call, names=tuple(sorted(names)))
        self._nodes.clear()

    def _reached(
        self, node: Any, known: Mapping[Any, frozenset[str]], most: int
    ) -> tuple[frozenset[str], int]:
        """The parameters behind a node, and how many nodes were visited."""
        waiting, seen, names = [node], {node}, set[str]()
        while waiting and len(seen) <= most:
            one = waiting.pop()
            if one in known:
                names |= known[one]
                continue
            variable = getattr(one, "variable", None)
            if variable is not None and id(variable) in self._parameters:
                names.add(self._parameters[id(variable)])
            for following, _ in one.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return frozenset(names), len(seen)
