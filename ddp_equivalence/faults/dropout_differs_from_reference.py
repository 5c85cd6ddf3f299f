"""Each rank draws its dropout masks with a seed of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.faults.changed_ddp import around_ddp_forward
from ddp_equivalence.faults.fault import Fault, RecordFiring

SEED = 1234


def seed_before_forward(record_firing: RecordFiring, by_rank: bool) -> Any:
    """Set the seed before every forward pass: one for each rank, or the same on all."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        if dist.get_world_size() > 1:
            torch.manual_seed(SEED + (dist.get_rank() if by_rank else 0))
            record_firing()
        return call(*arguments, **named)

    return around_ddp_forward(change)


FAULT = Fault(
    name="dropout_differs_from_reference",
    sentence="Every rank seeds its generator with a seed of its own before the forward pass.",
    break_torch=lambda record_firing: seed_before_forward(record_firing, by_rank=True),
    strategies=("ddp_mean",),
    pairs=(("dropout", "mse_mean"), ("dropout", "cross_entropy_mean")),
    strategy_differs_anyway=True,
    own_step="of_dropout",
    acts_at=("forward",),
)
