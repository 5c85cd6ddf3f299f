"""``zero_grad`` does nothing, so that old gradients are added to new ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn, optim

from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere


@contextmanager
def ignore_zero_grad(record_firing: RecordFiring) -> Iterator[None]:
    """``zero_grad`` of modules and optimizers clears nothing."""

    def of_module(module: nn.Module, *arguments: Any, **named: Any) -> None:
        if any(parameter.grad is not None for parameter in module.parameters()):
            record_firing()

    def of_optimizer(optimizer: optim.Optimizer, *arguments: Any, **named: Any) -> None:
        record_firing()

    with (
        patch.object(nn.Module, "zero_grad", of_module),
        patch.object(optim.Optimizer, "zero_grad", of_optimizer),
    ):
        yield


FAULT = Fault(
    name="stale_gradient_added",
    sentence="zero_grad leaves gradients as they are.",
    break_torch=ignore_zero_grad,
    why_it_cannot_show=shows_everywhere,
    steps=2,
    own_step="of_two_batches",
    acts_at=("zero_grad", "backward"),
)
