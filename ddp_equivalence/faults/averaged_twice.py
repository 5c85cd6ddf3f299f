"""The mean over the ranks is divided by their number once more."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import averaged, reducing


def divided_again(bucket: GradBucket) -> Tensor:
    """Averaged, and divided by the number of ranks."""
    return averaged(bucket.buffer()).div_(dist.get_world_size())


FAULT = Fault(
    name="averaged_twice",
    sentence="DDP's communication hook divides the average by the number of ranks once more.",
    in_torch=lambda fire: reducing(fire, divided_again),
)
