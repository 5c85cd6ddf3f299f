"""Gradients are cleared before every forward pass, also within an accumulation window."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.changed_ddp import around_ddp_forward
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere


def clear_before_forward(record_firing: RecordFiring) -> Any:
    """Clear gradients before every forward pass."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        if any(parameter.grad is not None for parameter in ddp.module.parameters()):
            ddp.module.zero_grad(set_to_none=True)
            record_firing()
        return call(*arguments, **named)

    return around_ddp_forward(change)


FAULT = Fault(
    name="only_last_micro_batch",
    sentence="zero_grad is called before every micro-batch, not once before the window.",
    break_torch=clear_before_forward,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_accumulation",),
    own_step="accumulating",
    acts_at=("forward",),
)
