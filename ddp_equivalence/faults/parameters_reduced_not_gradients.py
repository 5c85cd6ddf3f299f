"""The parameters of a bucket are averaged, and its gradients left alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.in_ddp import averaged, reducing


def of_parameters(bucket: GradBucket) -> Tensor:
    """All-reduces parameters and returns the bucket as it came."""
    for parameter in bucket.parameters():
        with torch.no_grad():
            averaged(parameter.detach().clone())
    values: Tensor = bucket.buffer()
    return values


FAULT = Fault(
    name="parameters_reduced_not_gradients",
    sentence="DDP's communication hook averages the parameters of a bucket, not its gradients.",
    in_torch=lambda fire: reducing(fire, of_parameters),
)
