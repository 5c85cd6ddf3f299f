"""DDP does not reduce one of its buckets, which has several parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault, RecordFiring

BUCKETS = 3
"""About how many buckets DDP makes. One of them is not reduced, and the others are right."""


@contextmanager
def leave_out_one_bucket(record_firing: RecordFiring) -> Iterator[None]:
    """DDP makes small buckets, and does not reduce the first one with several parameters."""
    # Without small buckets, DDP puts all parameters into one bucket in its first iteration.
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]  # no stubs

    def in_small_buckets(tensors: Any, limits: Any, *more: Any, **named: Any) -> Any:
        limit = sum(tensor.numel() * tensor.element_size() for tensor in tensors) // BUCKETS
        return assign(tensors, [max(1, limit)], *more, **named)

    left_out: list[int] = []

    def reduce_all_but_one(bucket: GradBucket) -> Tensor:
        values: Tensor = bucket.buffer()
        if bucket.index() == 0:
            left_out.clear()
        if left_out or len(bucket.parameters()) == 1:
            return all_reduce_mean(values)
        left_out.append(bucket.index())
        record_firing()
        return values

    def record_nothing() -> None:
        """The other buckets are reduced rightly, so the fault does not fire there."""

    with (
        patch.object(dist, "_compute_bucket_assignment_by_size", in_small_buckets),
        ddp_hook(record_nothing, reduce_all_but_one),
    ):
        yield


FAULT = Fault(
    name="bucket_not_reduced",
    sentence="DDP's communication hook returns a bucket of several parameters unreduced.",
    break_torch=leave_out_one_bucket,
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean"), ("gru_tied", "token_mean")),
)
