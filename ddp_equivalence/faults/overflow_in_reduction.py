"""DDP adds gradients in float16, scaled so that the sum overflows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, all_reduce_sum, ddp_hook
from ddp_equivalence.faults.fault import Fault

ALMOST_LARGEST = 0.999 * torch.finfo(torch.float16).max


def average_in_float16(bucket: GradBucket) -> Tensor:
    """The mean over all ranks of gradients that just fit into float16, one by one."""
    values: Tensor = bucket.buffer()
    largest = values.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if dist.get_world_size() == 1 or not float(largest):
        return all_reduce_mean(values)
    scale = ALMOST_LARGEST / float(largest)
    total = all_reduce_sum((values * scale).to(torch.float16))
    return values.copy_(total / dist.get_world_size()).div_(scale)


FAULT = Fault(
    name="overflow_in_reduction",
    sentence="DDP's communication hook adds gradients in float16, with too large a scale.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_in_float16),
    # Where the largest gradients of two ranks have opposite signs, as with two_normalisers, their
    # sum does not overflow.
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean"), ("gru_tied", "token_mean")),
)
