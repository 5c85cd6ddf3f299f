"""``torch.distributed.all_reduce`` returns the mean where the caller asks for the sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.faults.fault import Fault, RecordFiring

SMALLEST_GRADIENT = 9
"""Tensors with fewer elements are counts, losses or flags, and are summed as usual."""


@contextmanager
def average_sums(record_firing: RecordFiring) -> Iterator[None]:
    """``dist.all_reduce`` of gradients returns the mean where the caller asks for the sum."""
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
            tensor.div_(dist.get_world_size())
            record_firing()
        return work

    with patch.object(dist, "all_reduce", all_reduce):
        yield


FAULT = Fault(
    name="mean_not_sum",
    sentence="torch.distributed.all_reduce divides its sum by the number of ranks.",
    break_torch=average_sums,
    strategies=("ddp_sum_hook",),
    pairs=(("mlp", "mse_sum"), ("conv", "cross_entropy_sum"), ("gru_tied", "token_sum")),
    shards=("equal", "uneven"),
    own_step="by_hand",
    acts_at=("all_reduce",),
)
