"""A contrastive loss is given the rank's shard only. Nothing has to be broken for that."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.changed_ddp import around_ddp_forward
from ddp_equivalence.faults.fault import Fault, RecordFiring


def record_calls(record_firing: RecordFiring) -> Any:
    """Change nothing, and record that DDP was called."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        record_firing()
        return call(*arguments, **named)

    return around_ddp_forward(change)


FAULT = Fault(
    name="contrastive_local_negatives",
    sentence="The contrastive loss takes its negatives from the rank's own shard.",
    break_torch=record_calls,
    strategies=("ddp_mean",),
    pairs=(("mlp", "contrastive"), ("conv", "contrastive")),
    strategy_differs_anyway=True,
    own_step="",
)
