"""Every rank changes its weights after they were broadcast."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.faults.in_ddp import after_making


def drifted(fire: Fire) -> Any:
    """Beyond rank 0 every weight is multiplied by a random number from 0.5 to 1.5."""

    def change(ddp: Any) -> None:
        if dist.get_rank() == 0:
            return
        generator = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for parameter in ddp.module.parameters():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_((0.5 + noise).to(parameter))
        fire()

    return after_making(change)


FAULT = Fault(
    name="weights_differ_between_ranks",
    sentence="All ranks but 0 change their weights after DistributedDataParallel was made.",
    in_torch=drifted,
)
