"""Remembers which line of the user's code first held each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_equivalence.measurement.calls import CodeLine

MOST_ENTRIES = 64
"""Of a longer list or dict, only so many entries are looked at."""


class TensorOrigins:
    """A line held a tensor first if it bound it to a name, put it into a dict or list that has a
    name, or returned it. No tensor is kept alive.
    """

    def __init__(self) -> None:
        self._lines = WeakTensorKeyDictionary()

    def after(self, frame: FrameType, line: CodeLine | None, returned: object) -> None:
        """This line of the frame has run.

        ``line``: None where the frame begins, since no line of it has made its arguments.
        ``returned``: what the frame returns, if it does.
        """
        for value in (*frame.f_locals.values(), returned):
            for tensor in _tensors_in(value):
                if tensor not in self._lines:
                    self._lines[tensor] = line

    def line_of(self, tensor: Tensor) -> CodeLine | None:
        """The line that first held the tensor; None if no line did."""
        found: CodeLine | None = self._lines.get(tensor)
        return found


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The value if it is a tensor, and otherwise the tensors that a dict or a sequence holds."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) is dict:
        yield from _tensors_of(list(value.values())[:MOST_ENTRIES])
    elif type(value) in (list, tuple):
        yield from _tensors_of(value[:MOST_ENTRIES])  # type: ignore[index]


def _tensors_of(values: object) -> Iterator[Tensor]:
    for one in values:  # type: ignore[attr-defined]
        if isinstance(one, Tensor):
            yield one
