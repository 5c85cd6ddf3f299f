"""All ranks except rank 0 change their weights after DDP has broadcast them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.faults.changed_ddp import after_ddp_init
from ddp_equivalence.faults.fault import Fault, RecordFiring


def change_weights(record_firing: RecordFiring) -> Any:
    """On all ranks except 0, multiply every weight by a random number from 0.5 to 1.5."""

    def change(ddp: Any) -> None:
        if dist.get_rank() == 0:
            return
        generator = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for parameter in ddp.module.parameters():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_((0.5 + noise).to(parameter))
        record_firing()

    return after_ddp_init(change)


FAULT = Fault(
    name="weights_differ_between_ranks",
    sentence="All ranks but 0 change their weights after DistributedDataParallel was made.",
    break_torch=change_weights,
    acts_at=("wrap",),
)
