"""zero_grad does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn, optim

from ddp_equivalence.faults.fault import Fault, Fire


@contextmanager
def forgotten(fire: Fire) -> Iterator[None]:
    """Nobody's zero_grad clears anything."""

    def of_module(module: nn.Module, *arguments: Any, **named: Any) -> None:
        if any(one.grad is not None for one in module.parameters()):
            fire()

    def of_optimizer(optimizer: optim.Optimizer, *arguments: Any, **named: Any) -> None:
        fire()

    with (
        patch.object(nn.Module, "zero_grad", of_module),
        patch.object(optim.Optimizer, "zero_grad", of_optimizer),
    ):
        yield


FAULT = Fault(
    name="stale_gradient_added",
    sentence="zero_grad leaves gradients as they are.",
    in_torch=forgotten,
    hidden=lambda layout: None,
    steps=2,
)
