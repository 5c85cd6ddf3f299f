"""Records which lines of the user's code run, and what kind of value each local name holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ddp_equivalence.measurement.calling_thread import backward_on_calling_thread
from ddp_equivalence.measurement.code_lines import is_users

MOST_LINES = 20_000
"""So many lines are remembered."""

MOST_ATTRIBUTES = 50
"""Of an object with more attributes, none is described."""


@dataclass
class LocalsSeen:
    """``lines``: file -> the lines that have run.

    ``values``: (file, first line of a function, with its decorators) -> name of a local variable,
    or ``self.x`` for an attribute of self -> a description of its value when the function ended,
    such as "tensor float64 3x4" or "int".
    """

    lines: dict[str, set[int]] = field(default_factory=dict)
    values: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)

    def add(self, other: LocalsSeen) -> None:
        """Take over what another rank has seen, where this one has seen nothing."""
        for file, lines in other.lines.items():
            self.lines.setdefault(file, set()).update(lines)
        for place, values in other.values.items():
            self.values[place] = values | self.values.get(place, {})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside the block, unless somebody else traces this thread already."""
        if sys.gettrace() is not None:
            yield
            return
        with backward_on_calling_thread():
            sys.settrace(self._on_call)
            try:
                yield
            finally:
                sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if is_users(frame.f_code.co_filename) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "line":
            lines = self.lines.setdefault(code.co_filename, set())
            if len(lines) < MOST_LINES:
                lines.add(frame.f_lineno)
        elif event == "return" and not code.co_name.startswith("<"):  # no lambda, no module
            self._on_return(frame)
        return self._on_line

    def _on_return(self, frame: FrameType) -> None:
        code = frame.f_code
        known = self.values.setdefault((code.co_filename, code.co_firstlineno), {})
        known.update({name: described(value) for name, value in _named(frame)})


def _named(frame: FrameType) -> Iterator[tuple[str, object]]:
    for name, value in list(frame.f_locals.items()):
        if name.isidentifier():  # pytest adds names that nobody can write
            yield name, value
    owner = frame.f_locals.get("self")
    try:
        attributes: Mapping[str, object] = dict(object.__getattribute__(owner, "__dict__"))
    except AttributeError:  # its class has slots
        return
    if issubclass(type(owner), nn.Module):
        attributes = {name: one for name, one in attributes.items() if not name.startswith("_")}
    if len(attributes) <= MOST_ATTRIBUTES:
        for name, value in attributes.items():
            yield f"self.{name}", value


def described(value: object) -> str:
    """What kind of value this is. Values with the same description can stand for each other."""
    kind = type(value)
    if not issubclass(kind, Tensor):  # of the type alone: the user's object may answer anything
        return kind.__name__
    assert isinstance(value, Tensor)
    try:
        shape = "x".join(map(str, value.shape))
    except RuntimeError:  # a nested tensor has none
        return f"{kind.__name__} {value.dtype}"
    return f"tensor {str(value.dtype).removeprefix('torch.')} {shape}".rstrip()
