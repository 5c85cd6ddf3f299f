"""A bucket of several parameters comes back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.faults.in_ddp import averaged, reducing

BUCKETS = 3
"""About as many as this, so that some have several parameters and some are right."""


@contextmanager
def one_left_out(fire: Fire) -> Iterator[None]:
    """Small buckets, of which the first with several parameters is handed back."""
    # Else DDP puts all parameters in one bucket in its first iteration.
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]  # no stubs

    def in_small_buckets(tensors: Any, limits: Any, *more: Any, **named: Any) -> Any:
        limit = sum(one.numel() * one.element_size() for one in tensors) // BUCKETS
        return assign(tensors, [max(1, limit)], *more, **named)

    left_out: list[int] = []

    def but_one(bucket: GradBucket) -> Tensor:
        values: Tensor = bucket.buffer()
        if bucket.index() == 0:
            left_out.clear()
        if left_out or len(bucket.parameters()) == 1:
            return averaged(values)
        left_out.append(bucket.index())
        fire()
        return values

    def unnoticed() -> None:
        """The fault fires at one bucket only."""

    with (
        patch.object(dist, "_compute_bucket_assignment_by_size", in_small_buckets),
        reducing(unnoticed, but_one),
    ):
        yield


FAULT = Fault(
    name="bucket_not_reduced",
    sentence="DDP's communication hook returns a bucket of several parameters unreduced.",
    in_torch=one_left_out,
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean"), ("gru_tied", "token_mean")),
)
