"""``torch.distributed.all_reduce`` of a gradient is called once more by every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.faults.mean_not_sum import SMALLEST_GRADIENT


@contextmanager
def reduce_twice(record_firing: RecordFiring) -> Iterator[None]:
    """``dist.all_reduce`` adds gradients up, and then adds up the sums."""
    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *more: Any, **named: Any) -> Any:
        work = reduce(tensor, op, *more, **named)
        if (
            op == dist.ReduceOp.SUM
            and tensor.is_floating_point()
            and tensor.numel() >= SMALLEST_GRADIENT
        ):
            if work is not None:
                work.wait()
            work = reduce(tensor, op, *more, **named)
            record_firing()
        return work

    with patch.object(dist, "all_reduce", all_reduce):
        yield


FAULT = Fault(
    name="reduced_more_than_once",
    sentence="torch.distributed.all_reduce adds gradients up over the ranks twice.",
    break_torch=reduce_twice,
    strategies=("manual_all_reduce_mean",),
    own_step="by_hand",
    acts_at=("all_reduce",),
)
