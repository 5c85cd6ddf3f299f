"""Torch's losses return the sum where the caller asks for the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn import functional

from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere

LOSSES = ("mse_loss", "l1_loss", "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits")


@contextmanager
def sum_losses(record_firing: RecordFiring) -> Iterator[None]:
    """The losses of torch.nn.functional return a sum where the caller asks for the mean."""

    def broken(loss: Callable[..., Any]) -> Callable[..., Any]:
        def total(*arguments: Any, **named: Any) -> Any:
            if named.get("reduction", "mean") == "mean":
                named["reduction"] = "sum"
                record_firing()
            return loss(*arguments, **named)

        return total

    with ExitStack() as stack:
        for name in LOSSES:
            stack.enter_context(patch.object(functional, name, broken(getattr(functional, name))))
        yield


FAULT = Fault(
    name="local_loss_summed",
    sentence="torch.nn.functional's losses take the sum over the rank's examples, not the mean.",
    break_torch=sum_losses,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    acts_at=("loss",),
)
