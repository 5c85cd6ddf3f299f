"""``torch.distributed.all_reduce`` returns the mean where the caller asks for the sum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.faults.changed_sums import after_each_sum
from ddp_equivalence.faults.fault import Fault, RecordFiring


def average_sums(record_firing: RecordFiring) -> AbstractContextManager[None]:
    """``dist.all_reduce`` of gradients returns the mean where the caller asks for the sum."""

    def divide(sum_again: Callable[[], Any], tensor: Tensor) -> None:
        tensor.div_(dist.get_world_size())

    return after_each_sum(record_firing, divide)


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
