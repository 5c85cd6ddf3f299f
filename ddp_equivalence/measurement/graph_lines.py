"""Finds the lines of the user's code that made the nodes of an autograd graph.

Every node has a number, and the numbers of a thread only grow. So it is enough to note the next
number after each line.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.measurement.calls import CodeLine

MOST_NODES = 500
"""Of a larger graph, only the nodes next to the loss are looked at."""


class GraphLines:
    """The lines that have added nodes to the graph of this thread."""

    def __init__(self) -> None:
        self._ends: list[int] = [_next_number()]
        self._lines: list[CodeLine | None] = [None]

    def after(self, line: CodeLine) -> None:
        """This line has run."""
        end = _next_number()
        if end != self._ends[-1]:
            self._ends.append(end)
            self._lines.append(line)

    def of(self, roots: Iterable[Tensor], beyond: Set[CodeLine]) -> Mapping[CodeLine, str]:
        """The lines that computed these tensors, the last one first, and the functions they used.

        Nodes behind one whose line is in ``beyond`` are left out.
        """
        found: dict[CodeLine, dict[str, None]] = {}
        waiting = deque(root.grad_fn for root in roots if root.grad_fn is not None)
        known: set[Any] = set()
        while waiting and len(known) < MOST_NODES:
            node = waiting.popleft()
            if node in known:
                continue
            known.add(node)
            line = self._line_of(node)
            if line is not None:
                found.setdefault(line, {})[node.name().partition("Backward")[0]] = None
            if line not in beyond:
                waiting += [one for one, _ in node.next_functions if one is not None]
        return {line: " ".join(names) for line, names in found.items()}

    def _line_of(self, node: Any) -> CodeLine | None:
        place = bisect_right(self._ends, node._sequence_nr())
        return self._lines[place] if place < len(self._lines) else None


def _next_number() -> int:
    # Torch 2.13 has no public way to ask for it.
    number: int = torch._C._autograd._get_sequence_nr()
    return number
