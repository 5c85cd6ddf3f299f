"""Gradients are cleared before every forward pass, in a window too."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.faults.in_ddp import calling


def cleared(fire: Fire) -> Any:
    """Gradients are cleared before every forward pass."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        if any(one.grad is not None for one in ddp.module.parameters()):
            ddp.module.zero_grad(set_to_none=True)
            fire()
        return call(*arguments, **named)

    return calling(change)


FAULT = Fault(
    name="only_last_micro_batch",
    sentence="zero_grad is called before every micro-batch, not once before the window.",
    in_torch=cleared,
    hidden=lambda layout: None,
    strategies=("ddp_accumulation",),
)
