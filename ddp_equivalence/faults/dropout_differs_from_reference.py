"""Each rank draws masks from a generator of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.faults.in_ddp import calling

SEED = 1234


def seeding(fire: Fire, by_rank: bool) -> Any:
    """Seed before every forward pass, by rank or all alike."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        if dist.get_world_size() > 1:
            torch.manual_seed(SEED + (dist.get_rank() if by_rank else 0))
            fire()
        return call(*arguments, **named)

    return calling(change)


FAULT = Fault(
    name="dropout_differs_from_reference",
    sentence="Every rank seeds its generator with a seed of its own before the forward pass.",
    in_torch=lambda fire: seeding(fire, by_rank=True),
    strategies=("ddp_mean",),
    pairs=(("dropout", "mse_mean"), ("dropout", "cross_entropy_mean")),
    by_design=True,
)
