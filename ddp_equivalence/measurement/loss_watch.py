"""Notices the losses that a step makes, and the lines that make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.measurement.calls import CodeLine

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
