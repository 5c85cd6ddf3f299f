"""Remembers which line of the user's code first held each tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor

from ddp_equivalence.measurement.calls import CodeLine

MOST_ENTRIES = 64
"""Of a longer list or dict, only so many entries are looked at."""

CONTAINERS = frozenset({dict, list, tuple})


class TensorOrigins:
    """A line held a tensor first if it bound it to a name, put it into a dict or list that has a
    name, or returned it. No tensor is kept alive.
    """

    def __init__(self) -> None:
        self._lines: dict[int, tuple[weakref.ref[Tensor], CodeLine | None]] = {}
        self._sizes: dict[int, dict[str, tuple[int, int]]] = {}
        """id of a frame -> name -> id and length of the container that was last looked into."""

    def after(self, frame: FrameType, line: CodeLine | None, returned: object) -> None:
        """This line of the frame has run. This is called after every line, so it must be quick.

        ``line``: None where the frame begins, since no line of it has made its arguments.
        ``returned``: what the frame returns, if it does.
        """
        if line is None:
            self._sizes[id(frame)] = {}
        sizes = self._sizes.setdefault(id(frame), {})
        for name, value in frame.f_locals.items():
            kind = type(value)
            if kind is Tensor:
                self._hold(value, line)
            elif kind in CONTAINERS:
                size = id(value), len(value)
                if sizes.get(name) != size:
                    sizes[name] = size
                    self._hold_all(_entries(value), line)
        if returned is not None:
            self._hold_all(_entries(returned), line)

    def line_of(self, tensor: Tensor) -> CodeLine | None:
        """The line that first held the tensor; None if no line did."""
        known = self._lines.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _hold_all(self, values: Iterable[object], line: CodeLine | None) -> None:
        for value in values:
            if type(value) is Tensor:
                self._hold(value, line)

    def _hold(self, tensor: Tensor, line: CodeLine | None) -> None:
        known = self._lines.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._lines[id(tensor)] = weakref.ref(tensor), line


def _entries(value: Any) -> Iterable[object]:
    """The first entries of a dict, list or tuple; of anything else, only itself."""
    if type(value) is dict:
        return list(value.values())[:MOST_ENTRIES]
    return value[:MOST_ENTRIES] if type(value) in CONTAINERS else (value,)
