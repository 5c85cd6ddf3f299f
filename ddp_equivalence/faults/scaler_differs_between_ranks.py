"""Each rank scales its gradients by a different number, and divides the average by that number."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault, RecordFiring

SCALE = 256.0


def scale_by_rank(record_firing: RecordFiring) -> Any:
    """Rank r scales by SCALE times 2^r, averages, and divides by its own scale."""

    def reduce(bucket: GradBucket) -> Tensor:
        scale = SCALE * 2 ** dist.get_rank()
        return all_reduce_mean(bucket.buffer().mul_(scale)).div_(scale)

    return ddp_hook(record_firing, reduce)


FAULT = Fault(
    name="scaler_differs_between_ranks",
    sentence="Every rank has its own loss scale, and divides the averaged gradient by that scale.",
    break_torch=scale_by_rank,
)
