"""Sees in which precision a step computes: where it enters autocast, and where it uses float32."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_equivalence.ranks.users_line import users_line

Autocast = tuple[str, torch.dtype]
"""The device type and the dtype of an autocast region."""


@contextmanager
def autocast_entered() -> Iterator[set[Autocast]]:
    """Collect, inside the block, the autocast regions that code with gradients enters.

    What runs without gradients, such as an evaluation on one rank, does not count.
    """
    entered: set[Autocast] = set()
    enter: Callable[[Any], Any] = torch.autocast.__enter__

    def recording(autocast: Any) -> Any:
        if autocast._enabled and torch.is_grad_enabled():
            entered.add((autocast.device, autocast.fast_dtype))
        return enter(autocast)

    torch.autocast.__enter__ = recording  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


class Float32Watch(TorchDispatchMode):
    """Notes the first operation inside the block that takes values in float32 into float64.

    Whole numbers do not count, since float32 rounds none of them: they are masks, flags or counts.

    ``found``: the operation and the line of the user's code that called it; "" if there was none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.found = ""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.found and _enters_float64(result, (args, kwargs)):
            name = str(function).partition(".")[2].partition(".")[0] or str(function)
            line = users_line(sys._getframe(1))
            self.found = f"{name} at {line}" if line else name
        return result


def _enters_float64(result: object, arguments: object) -> bool:
    """True if the result is in float64 although an argument was rounded to float32."""
    return any(map(_is_float64, pytree.tree_leaves(result))) and any(
        map(_is_rounded_to_float32, pytree.tree_leaves(arguments))
    )


def _is_float64(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64


def _is_rounded_to_float32(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dtype is not torch.float32:
        return False
    return bool((value != value.round()).any())
