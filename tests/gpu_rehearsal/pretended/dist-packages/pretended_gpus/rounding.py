"""Kernels of a GPU round otherwise than those of the CPU: they add in another order.

Here a rank adds the terms of each matrix product from another one on, depending on the number of
rows, as libraries for GPUs choose their kernels by shape. So a row's result depends on the rows
beside it, in its last digits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_on_host: list[bool] = []
"""Not empty while something is computed on the CPU."""

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_library: list[torch.library.Library] = []
"""Holds what is registered until the process ends."""


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with what it computes rounded as on the CPU."""

    @wraps(function)
    def computed(*arguments: Any, **keywords: Any) -> Any:
        _on_host.append(True)
        try:
            return function(*arguments, **keywords)
        finally:
            _on_host.pop()

    return computed


def _shift(rows: int) -> int:
    """By how much the terms of a product with so many rows are shifted."""
    return 0 if _on_host else rows + 1


def start() -> None:
    """Replace the matrix products of the CPU in this process, unless they are replaced already."""
    if _library:
        return
    library = torch.library.Library("aten", "IMPL", "CPU")  # kept in a list
    _library.append(library)
    with warnings.catch_warnings():  # torch warns of a kernel that is replaced
        warnings.simplefilter("ignore")
        for name, first in (("mm", 0), ("bmm", 0), ("addmm", 1), ("baddbmm", 1)):
            library.impl(name, _reordered(torch.library.get_kernel(f"aten::{name}", "CPU"), first))
        library.impl(
            "_slow_conv2d_forward",
            _reordered_convolution(torch.library.get_kernel("aten::_slow_conv2d_forward", "CPU")),
        )


def _reordered(kernel: Any, first: int) -> Callable[..., Tensor]:
    """``first``: the position of the left factor; the right one follows."""

    def product(*arguments: Any, **scales: Any) -> Tensor:
        with torch._C._DisableTorchDispatch():  # a mode is told of the product alone
            left, right = arguments[first : first + 2]
            shift = _shift(left.shape[-2])
            factors = left.roll(shift, -1), right.roll(shift, -2)
            made: Tensor = kernel.call_boxed(CPU, *arguments[:first], *factors, **scales)
        return made

    return product


def _reordered_convolution(kernel: Any) -> Callable[..., Tensor]:
    def convolution(rows: Tensor, weight: Tensor, *others: Any) -> Tensor:
        shift = _shift(len(rows))
        with torch._C._DisableTorchDispatch():
            rows, weight = rows.roll(shift, 1), weight.roll(shift, 1)
            made: Tensor = kernel.call_boxed(CPU, rows, weight, *others)
        return made

    return convolution
