"""The forward method of an ``autograd.Function`` is known by its code, under every torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from ddp_equivalence.measurement.graph_watch import _is_inside_a_function

seen: list[bool] = []


def look() -> None:
    """Ask, from where this is called."""
    seen.append(_is_inside_a_function(sys._getframe()))


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*arguments: Any) -> Any:
        return forward(*arguments)

    return wrapped


class Plain(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        look()
        return tensor * 2


class Decorated(Function):
    @staticmethod
    @decorated
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        look()
        return tensor * 2


class Mixin:
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        look()
        return tensor * 2


class Inherited(Mixin, Function):
    """Its forward method is that of the first base."""


@pytest.mark.parametrize("function", [Plain, Decorated, Inherited])
def test_inside_a_forward_method(function: type[Function]) -> None:
    seen.clear()
    function.apply(torch.ones(2))
    look()
    assert seen == [True, False]
