"""Each rank scales by another number, and unscales the average by its own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.faults.in_ddp import averaged, reducing

SCALE = 256.0


def own_scale(fire: Fire) -> Any:
    """Scaled by 256 times two to the rank, and unscaled by the same."""

    def reduce(bucket: GradBucket) -> Tensor:
        scale = SCALE * 2 ** dist.get_rank()
        return averaged(bucket.buffer().mul_(scale)).div_(scale)

    return reducing(fire, reduce)


FAULT = Fault(
    name="scaler_differs_between_ranks",
    sentence="Every rank scales by another loss scale, and unscales the average by it.",
    in_torch=own_scale,
)
