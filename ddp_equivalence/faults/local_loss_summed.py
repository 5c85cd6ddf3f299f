"""Torch's losses take the sum where the mean is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn import functional

from ddp_equivalence.faults.fault import Fault, Fire

LOSSES = ("mse_loss", "l1_loss", "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits")


@contextmanager
def summing(fire: Fire) -> Iterator[None]:
    """A mean that is asked for is a sum."""

    def broken(loss: Callable[..., Any]) -> Callable[..., Any]:
        def total(*arguments: Any, **named: Any) -> Any:
            if named.get("reduction", "mean") == "mean":
                named["reduction"] = "sum"
                fire()
            return loss(*arguments, **named)

        return total

    with ExitStack() as stack:
        for name in LOSSES:
            stack.enter_context(patch.object(functional, name, broken(getattr(functional, name))))
        yield


FAULT = Fault(
    name="local_loss_summed",
    sentence="torch.nn.functional's losses take the sum over the rank's examples, not the mean.",
    in_torch=summing,
    hidden=lambda layout: None,
    strategies=("ddp_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
)
