"""Notices lists of whole numbers that lines of the user's code make, such as orders of examples."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.code_lines import is_users, line_at

FEWEST, MOST = 2, 512
"""Shorter and longer lists are not looked at."""

MOST_LISTS = 100
"""Later lists are not noticed."""

MOST_ATTRIBUTES = 32
"""An object with more attributes is not looked into."""

KINDS = frozenset({list, tuple, range, slice, Tensor})

Note = Callable[[CodeLine, str, tuple[int, ...]], object]
"""Gets the line, the name of the variable, and the numbers in it."""


class IndexLists:
    """Tells ``note`` of each variable that a line has given another list of whole numbers, and of
    each such list that a line returned, with the name of its function.

    Lists, tuples, ranges and slices of numbers count, and tensors and arrays with one dimension.
    Local variables are looked at, and the attributes of ``self``. What a function is given was made
    by the line that calls it.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._known: dict[tuple[int, str], tuple[int, int, int]] = {}
        self._values: dict[tuple[str, str], tuple[int, ...]] = {}
        self._noted = 0

    def after(self, frame: FrameType, line: CodeLine | None, returned: object = None) -> None:
        """This line of the frame has run. This is called after every line, so it must be quick.

        ``line``: None where the frame begins. ``returned``: what the frame returns, if it does.
        """
        if self._noted >= MOST_LISTS:
            return
        if line is None:
            line = _line_of_caller(frame)
            if line is None:
                return
        elif _may_be_a_list(returned):
            self._see(id(frame), line, f"{frame.f_code.co_name}()", returned)
        for name, value in frame.f_locals.items():
            if _may_be_a_list(value):
                self._see(id(frame), line, name, value)
            elif name == "self" and not isinstance(value, nn.Module):
                self._see_attributes(line, value)

    def _see_attributes(self, line: CodeLine, owner: object) -> None:
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is dict and len(attributes) <= MOST_ATTRIBUTES:
            for name, value in attributes.items():
                if _may_be_a_list(value):
                    self._see(id(owner), line, f"self.{name}", value)

    def _see(self, owner: int, line: CodeLine, name: str, value: Any) -> None:
        try:
            value = _range_of(value) if type(value) is slice else value
            length = len(value)
            version = value._version if type(value) is Tensor else 0
        except (TypeError, RuntimeError):  # a tensor without dimensions, or of inference mode
            return
        if not FEWEST <= length <= MOST:
            return
        key = owner, name
        state = hash(value) if type(value) is range else id(value), length, version
        if self._known.get(key) == state:
            return
        self._known[key] = state
        numbers = _whole_numbers(value)
        place = line.function, name
        if numbers and self._values.get(place) != numbers:
            self._values[place] = numbers
            self._noted += 1
            self._note(line, name, numbers)


def _may_be_a_list(value: object) -> bool:
    kind = type(value)
    return kind in KINDS or kind.__name__ == "ndarray"


def _range_of(value: slice) -> range:
    """The positions of a slice whose ends are known; without an end it has none."""
    ends = value.start or 0, value.stop, value.step or 1
    known = all(type(one) is int and one >= 0 for one in ends)
    return range(*ends) if known else range(0)


def _line_of_caller(frame: FrameType) -> CodeLine | None:
    """The line of the user's that has called a function directly."""
    caller = frame.f_back
    is_known = caller is not None and is_users(caller.f_code.co_filename)
    return line_at(caller) if caller is not None and is_known else None


def _whole_numbers(value: Any) -> tuple[int, ...]:
    """The numbers in a list; () if it holds others, or anything else."""
    if type(value) is Tensor:
        if value.dtype is not torch.int64 or value.ndim != 1 or value.device.type != "cpu":
            return ()
        return tuple(value.tolist())
    if type(value) is range:
        return tuple(value)
    if type(value) in (list, tuple):
        return tuple(value) if all(type(one) is int for one in value) else ()
    is_plain = value.ndim == 1 and value.dtype.kind == "i"
    return tuple(value.tolist()) if is_plain else ()
