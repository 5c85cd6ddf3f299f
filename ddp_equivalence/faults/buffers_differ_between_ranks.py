"""All ranks except rank 0 change the buffers of the model, and nothing makes them equal again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.faults.changed_ddp import after_ddp_init
from ddp_equivalence.faults.fault import Fault, RecordFiring


def change_buffers(record_firing: RecordFiring) -> Any:
    """On all ranks except 0, multiply every buffer by random numbers from 0.5 to 1.5."""

    def change(ddp: Any) -> None:
        ddp.broadcast_buffers = False
        if dist.get_rank() == 0:
            return
        generator = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for buffer in ddp.module.buffers():
                noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
                buffer.mul_((0.5 + noise).to(buffer))
        record_firing()

    return after_ddp_init(change)


FAULT = Fault(
    name="buffers_differ_between_ranks",
    sentence="All ranks but 0 change the model's buffers, and DDP does not broadcast them.",
    break_torch=change_buffers,
    strategies=("ddp_mean",),
    pairs=(("odd_shapes", "mse_mean"), ("odd_shapes", "cross_entropy_mean")),
    own_step="of_buffers",
    acts_at=("wrap",),
)
