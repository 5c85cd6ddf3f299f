"""Changes what ``torch.distributed.all_reduce`` leaves where it adds up gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.faults.fault import RecordFiring

SMALLEST_GRADIENT = 9
"""Tensors with fewer elements are counts, losses or flags, and are summed as usual."""


@contextmanager
def after_each_sum(
    record_firing: RecordFiring, change: Callable[[Callable[[], Any], Tensor], Any]
) -> Iterator[None]:
    """After each sum of gradients, call ``change(sum_again, tensor)`` once the sum is there.

    ``sum_again()`` adds the tensor up once more. The caller gets what ``change`` returns; None
    stands for what the sum itself returned.
    """
    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *more: Any, **named: Any) -> Any:
        work = reduce(tensor, op, *more, **named)
        is_gradient = tensor.is_floating_point() and tensor.numel() >= SMALLEST_GRADIENT
        if op == dist.ReduceOp.SUM and is_gradient:
            if work is not None:
                work.wait()
            changed = change(lambda: reduce(tensor, op, *more, **named), tensor)
            work = work if changed is None else changed
            record_firing()
        return work

    with patch.object(dist, "all_reduce", all_reduce):
        yield
