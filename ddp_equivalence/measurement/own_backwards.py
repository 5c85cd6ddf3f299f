"""Notes which backward methods of the user's own ran, and which gradients they left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from torch.autograd.function import BackwardCFunction

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.code_lines import is_users
from ddp_equivalence.measurement.cuts import OwnBackward

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
        """What ran, in the order in which it ran first."""
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
