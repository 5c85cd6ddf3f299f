"""Records what the names in functions of the user's own held when these functions returned."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_equivalence.measurement.calls import (
    Held,
    NameAt,
    NotPlain,
    Operations,
    Value,
    is_users,
    plain,
)
from ddp_equivalence.measurement.observer import named_in, traced
from ddp_equivalence.measurement.operation_log import OperationLog

MOST_ELEMENTS = 1000
"""Larger tensors are not kept."""

MOST_TIMES = 16
"""So many values of a name are kept, the first ones."""

MOST_NAMES = 2000
"""Values of so many names are kept."""

MOST_PARTS = 50
DEEPEST = 2
"""A list or dictionary with more parts, or with others inside it that are deeper, is not kept."""

PLAIN = (bool, int, float, str)


class NamesHeld:
    """``found``: the name, and where its function begins -> what it held when calls of it ended."""

    def __init__(self) -> None:
        self.found: dict[NameAt, tuple[Held, ...]] = {}

    def watching(self) -> AbstractContextManager[None]:
        """Record inside the block, unless somebody else traces this thread already."""
        return traced(self._on_call)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not is_users(code.co_filename) or code.co_name.startswith("<"):
            return None
        frame.f_trace_lines = False
        return self._on_return

    def _on_return(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            with _disable_current_modes():  # a log of the step's operations has no room for these
                for name, value in named_in(frame):
                    at = NameAt(frame.f_code.co_filename, frame.f_code.co_firstlineno, name)
                    before = self.found.get(at, ())
                    if len(before) < MOST_TIMES and (before or len(self.found) < MOST_NAMES):
                        self.found[at] = (*before, _held(value))
        return self._on_return


class StepLog(OperationLog):
    """The operations of a step, and what names held meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._names = NamesHeld()

    def __enter__(self) -> Self:
        super().__enter__()
        self._watching[-1].enter_context(self._names.watching())
        return self

    def found(self, results: Mapping[str, Tensor | None]) -> Operations:
        """As of a log of operations, with the names."""
        return replace(super().found(results), names=self._names.found)


def _held(value: object, depth: int = 0) -> Held:
    kind = type(value)  # an object of the user's may answer anything
    if value is None or kind in PLAIN:
        plainly: Held = value  # type: ignore[assignment]
        return plainly
    if issubclass(kind, nn.Module):
        return kind.__qualname__  # all ranks begin with the same weights
    if issubclass(kind, Tensor):
        return _of_tensor(value)  # type: ignore[arg-type]
    if depth == DEEPEST or kind not in (dict, list, tuple, torch.Size):
        return ...
    items = value.items() if kind is dict else enumerate(value)  # type: ignore[attr-defined,arg-type]
    first = list(islice(items, MOST_PARTS + 1))
    if len(first) > MOST_PARTS or any(type(key) not in (str, int) for key, _ in first):
        return ...
    return tuple((str(key), _held(one, depth + 1)) for key, one in first)


def _of_tensor(value: Tensor) -> Held:
    try:
        tensor = plain(value)
    except NotPlain:
        return ...
    if tensor.numel() > MOST_ELEMENTS or tensor.is_complex() or tensor.is_sparse:
        return ...
    return Value.of(tensor)
