"""Functions that take the place of torch's, and whose frames count as torch's own."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

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
