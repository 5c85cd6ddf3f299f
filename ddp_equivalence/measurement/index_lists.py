"""Notices lists of whole numbers that lines of the user's code make, such as orders of examples."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.measurement.calls import CodeLine

FEWEST, MOST = 2, 512
"""Shorter and longer lists are not looked at."""

MOST_LISTS = 100
"""Later lists are not noticed."""

Note = Callable[[CodeLine, str, tuple[int, ...]], object]
"""Gets the line, the name of the variable, and the numbers in it."""


class IndexLists:
    """Tells ``note`` of each local variable that a line has given another list of whole numbers.

    Lists and tuples of numbers count, and tensors and arrays with one dimension.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._known: dict[tuple[int, str], tuple[int, int, int]] = {}
        self._values: dict[tuple[str, str], tuple[int, ...]] = {}
        self._noted = 0

    def after(self, frame: FrameType, line: CodeLine | None) -> None:
        """This line of the frame has run. This is called after every line, so it must be quick."""
        if line is None or self._noted >= MOST_LISTS:
            return
        for name, value in frame.f_locals.items():
            kind = type(value)
            if kind is list or kind is tuple or kind is Tensor or kind.__name__ == "ndarray":
                self._see(frame, line, name, value)

    def _see(self, frame: FrameType, line: CodeLine, name: str, value: Any) -> None:
        try:
            length = len(value)
            version = value._version if type(value) is Tensor else 0
        except (TypeError, RuntimeError):  # a tensor without dimensions, or of inference mode
            return
        if not FEWEST <= length <= MOST:
            return
        key = id(frame), name
        state = id(value), length, version
        if self._known.get(key) == state:
            return
        self._known[key] = state
        numbers = _whole_numbers(value)
        place = line.function, name
        if numbers and self._values.get(place) != numbers:
            self._values[place] = numbers
            self._noted += 1
            self._note(line, name, numbers)


def _whole_numbers(value: Any) -> tuple[int, ...]:
    """The numbers in a list; () if it holds others, or anything else."""
    if type(value) is Tensor:
        if value.dtype is not torch.int64 or value.ndim != 1 or value.device.type != "cpu":
            return ()
        return tuple(value.tolist())
    if type(value) in (list, tuple):
        return tuple(value) if all(type(one) is int for one in value) else ()
    is_plain = value.ndim == 1 and value.dtype.kind == "i"
    return tuple(value.tolist()) if is_plain else ()
