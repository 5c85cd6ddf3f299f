"""A sum over ranks is divided by their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.faults.fault import Fault, Fire


@contextmanager
def averaging(fire: Fire) -> Iterator[None]:
    """Whoever asks ``dist.all_reduce`` for a sum of gradients gets the mean."""
    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *more: Any, **named: Any) -> Any:
        work = reduce(tensor, op, *more, **named)
        if op == dist.ReduceOp.SUM and tensor.is_floating_point() and tensor.numel() > MOST_FLAGS:
            if work is not None:
                work.wait()
            tensor.div_(dist.get_world_size())
            fire()
        return work

    with patch.object(dist, "all_reduce", all_reduce):
        yield


MOST_FLAGS = 8
"""What is smaller than that is no gradient but a count, a loss or a flag."""

FAULT = Fault(
    name="mean_not_sum",
    sentence="torch.distributed.all_reduce divides what it adds up by the number of ranks.",
    in_torch=averaging,
    strategies=("ddp_sum_hook",),
    pairs=(("mlp", "mse_sum"), ("conv", "cross_entropy_sum"), ("gru_tied", "token_sum")),
    shards=("equal", "uneven"),
)
