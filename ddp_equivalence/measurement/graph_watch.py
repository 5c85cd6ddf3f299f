"""Watches the autograd graph: the lines behind a loss, and backward methods of the user's own."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ddp_equivalence.measurement.calls import CodeLine, is_users

# Backward methods of the user's own, as data that the ranks send to the judging process.


@dataclass(frozen=True)
class OwnBackward:
    """The backward method of an ``autograd.Function`` of the user's ran.

    ``name``: the class of the function. ``line``: the line that returned the gradients.
    ``backwards``: how many calls of backward had begun, with the one that runs. ``withheld``: the
    numbers of the inputs, from 0, that require a gradient and got None. ``times``: how often it
    ran so.
    """

    name: str
    line: CodeLine
    step: int
    backwards: int
    withheld: tuple[int, ...] = ()
    times: int = 1


# Finds the lines of the user's code that made the nodes of an autograd graph.
#
# Every node has a number, and the numbers of a thread only grow. So it is enough to note the next
# number after each line.

MOST_NODES_WITH_LINES = 500
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

    def of(
        self, roots: Iterable[Tensor], beyond: Set[CodeLine]
    ) -> Mapping[CodeLine, tuple[str, ...]]:
        """The lines that computed these tensors, the last one first, and the functions they used.

        Nodes behind one whose line is in ``beyond`` are left out.
        """
        found: dict[CodeLine, dict[str, None]] = {}
        waiting = deque(root.grad_fn for root in roots if root.grad_fn is not None)
        known: set[Any] = set()
        while waiting and len(known) < MOST_NODES_WITH_LINES:
            node = waiting.popleft()
            if node in known:
                continue
            known.add(node)
            line = self._line_of(node)
            if line is not None:
                found.setdefault(line, {})[node.name().partition("Backward")[0]] = None
            if line not in beyond:
                waiting += [one for one, _ in node.next_functions if one is not None]
        return {line: tuple(names) for line, names in found.items()}

    def _line_of(self, node: Any) -> CodeLine | None:
        place = bisect_right(self._ends, node._sequence_nr())
        return self._lines[place] if place < len(self._lines) else None


def _next_number() -> int:
    # Torch 2.13 has no public way to ask for it.
    number: int = torch._C._autograd._get_sequence_nr()
    return number


# Notices the losses that a step makes, and the lines that make them.

MOST_LOSSES = 1_000
"""Later ones are not noticed, so that a loop over tokens leaves room for other calls."""

Note = Callable[[CodeLine, float, Any], object]
"""Gets the line, the value of the loss, and the node of the graph that made it."""


class LossWatch:
    """Tells ``note`` of every scalar with a gradient that a line leaves in a local variable, or
    returns, once in each function that gets hold of it. Attributes of objects, and entries of
    lists, are not looked at.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._known: dict[tuple[int, str], tuple[weakref.ref[Tensor], int]] = {}
        self._noted = 0

    def after_line(self, line: CodeLine, frame: FrameType, returned: Any) -> bool:
        """A line of this frame has run. Returns whether it has made a loss."""
        found = False
        for value in (*frame.f_locals.values(), returned):
            if isinstance(value, Tensor) and value.grad_fn is not None and value.numel() == 1:
                found |= self._see(line, value)
        return found

    def _see(self, line: CodeLine, loss: Tensor) -> bool:
        key = id(loss), line.function
        known = self._known.get(key)
        if known is not None and known[0]() is loss and known[1] == loss._version:
            return False
        self._known[key] = weakref.ref(loss), loss._version
        if self._noted >= MOST_LOSSES or loss.grad_fn is None:
            return False
        self._noted += 1
        with torch.no_grad():
            self._note(line, float(loss.detach()), loss.grad_fn)
        return True


# Notes which backward methods of the user's own ran, and which gradients they left out.

MOST_FOUND = 200
MOST_DECORATORS = 4

_APPLY = frozenset(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")  # torch 2.11 has only the first
    if hasattr(BackwardCFunction, name)
)


class OwnBackwards:
    """``now()``: the number of the step, how many calls of backward have begun, and whether one
    runs.
    """

    def __init__(self, now: Callable[[], tuple[int, int, bool]]) -> None:
        self._now = now
        self._found: dict[OwnBackward, int] = {}

    @property
    def found(self) -> tuple[OwnBackward, ...]:
        """The backward methods that ran, in the order in which they ran first."""
        return tuple(replace(one, times=times) for one, times in self._found.items())

    def on_return(self, frame: FrameType, returned: object) -> None:
        """A function of the user's returns."""
        context: Any = _context_of(frame)
        if context is None:
            return
        code = frame.f_code
        gradients = returned if isinstance(returned, tuple) else (returned,)
        step, backwards, _ = self._now()
        needed = [number for number, needs in enumerate(context.needs_input_grad) if needs]
        edges = [node for node, _ in context.next_functions if node is not None]
        one = OwnBackward(
            name=type(context)._forward_cls.__name__,
            line=CodeLine(code.co_filename, frame.f_lineno, code.co_name),
            step=step,
            backwards=backwards,
            withheld=tuple(
                number
                for number, edge in zip(needed, edges, strict=True)
                if number < len(gradients) and gradients[number] is None and not _has_gradient(edge)
            ),
        )
        if one in self._found or len(self._found) < MOST_FOUND:
            self._found[one] = self._found.get(one, 0) + 1


def _has_gradient(edge: object) -> bool:
    """True for a parameter that has a gradient already, perhaps from a backward pass in here."""
    variable = getattr(edge, "variable", None)
    return variable is not None and variable.grad is not None


def _context_of(frame: FrameType) -> object:
    """The context of the function whose backward method this frame is; None if it is none."""
    caller = frame.f_back
    for _ in range(MOST_DECORATORS):
        if caller is None or is_users(caller.f_code.co_filename):
            return None
        if caller.f_code in _APPLY:
            return caller.f_locals.get("self")
        caller = caller.f_back
    return None
