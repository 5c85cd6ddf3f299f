"""The line of the user's own code that called a function of torch or of this package."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, TypeVar

from ddp_equivalence.ranks.importable import belongs_to_user


def users_line(frame: FrameType | None) -> str:
    """The innermost line of the user's code, as ``file:line``; "" if there is none."""
    path, number, _ = users_place(frame)
    return f"{os.path.basename(path)}:{number}" if path else ""


def users_place(frame: FrameType | None) -> tuple[str, int, str]:
    """The file, number and function of the innermost line of the user's code; "" if none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and belongs_to_user(path):
            return path, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "", 0, ""


# Functions that take the place of torch's, and whose frames count as torch's own.

FILE = "<ddp_equivalence watches /torch/>"
"""The file of such frames, as tracebacks and stacks show it.

Whoever looks in a stack for the user's line, or asks whether a rank waits inside torch, takes each
file below a folder called torch for one of torch.
"""

Function = TypeVar("Function", bound=Callable[..., Any])


def counts_as_torch(function: Function) -> Function:
    """The same function, whose frames are taken for torch's."""
    assert isinstance(function, FunctionType)
    copied: Any = FunctionType(
        function.__code__.replace(co_filename=FILE),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__doc__ = function.__doc__
    copied.__qualname__ = function.__qualname__
    copied.__module__ = function.__module__
    return copied  # type: ignore[no-any-return]
