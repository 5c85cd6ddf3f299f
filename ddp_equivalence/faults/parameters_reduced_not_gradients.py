"""DDP averages the parameters of a bucket, and not its gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault


def average_parameters(bucket: GradBucket) -> Tensor:
    """All-reduce the bucket's parameters, and return its gradients as they are."""
    for parameter in bucket.parameters():
        with torch.no_grad():
            all_reduce_mean(parameter.detach().clone())
    values: Tensor = bucket.buffer()
    return values


FAULT = Fault(
    name="parameters_reduced_not_gradients",
    sentence="DDP's communication hook averages the parameters of a bucket, not its gradients.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_parameters),
)
