"""The mean over all ranks is divided by the number of ranks once more."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault


def divide_mean_again(bucket: GradBucket) -> Tensor:
    """The mean over all ranks, divided by the number of ranks."""
    return all_reduce_mean(bucket.buffer()).div_(dist.get_world_size())


FAULT = Fault(
    name="averaged_twice",
    sentence="DDP's communication hook divides the average by the number of ranks once more.",
    break_torch=lambda record_firing: ddp_hook(record_firing, divide_mean_again),
)
