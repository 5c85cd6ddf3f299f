"""A loss scale or a narrow type reaches gradients that should not know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.faults.changed_ddp import all_reduce_mean, all_reduce_sum, ddp_hook
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere

# Backward begins at the loss times a loss scale, and the gradient is not unscaled.


LOSS_SCALE = 1024.0


@contextmanager
def scale_loss(record_firing: RecordFiring) -> Iterator[None]:
    """Backward begins at a scaled loss."""
    backward = torch.autograd.backward

    def backward_of_scaled(tensors: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(tensors, Tensor) and tensors.ndim == 0:
            tensors = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE).scale(tensors)
            record_firing()
        backward(tensors, *arguments, **named)

    with patch.object(torch.autograd, "backward", backward_of_scaled):
        yield


GRADIENT_SCALED_NOT_UNSCALED = Fault(
    name="gradient_scaled_not_unscaled",
    sentence="GradScaler scales the loss before backward, and nothing unscales the gradient.",
    break_torch=scale_loss,
    why_it_cannot_show=shows_everywhere,
    acts_at=("backward",),
)


# DDP averages gradients in bfloat16.


def average_in_bfloat16(bucket: GradBucket) -> Tensor:
    """The mean over all ranks, computed in bfloat16 and cast back."""
    values: Tensor = bucket.buffer()
    return values.copy_(all_reduce_mean(values.to(torch.bfloat16)))


LOW_PRECISION_REDUCE = Fault(
    name="low_precision_reduce",
    sentence="DDP's communication hook averages in bfloat16.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_in_bfloat16),
    why_it_cannot_show=shows_everywhere,
)


# DDP adds gradients in float16, scaled so that the sum overflows.


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


OVERFLOW_IN_REDUCTION = Fault(
    name="overflow_in_reduction",
    sentence="DDP's communication hook adds gradients in float16, with too large a scale.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_in_float16),
    # Where the largest gradients of two ranks have opposite signs, as with two_normalisers, their
    # sum does not overflow.
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean"), ("gru_tied", "token_mean")),
)


# The last bit of the averaged gradients is another one on every second rank.


def average_and_round(bucket: GradBucket) -> Tensor:
    """The mean over all ranks; on odd ranks the next larger number."""
    values = all_reduce_mean(bucket.buffer())
    if dist.get_rank() % 2 == 0:
        return values
    return values.copy_(torch.nextafter(values, torch.full_like(values, torch.inf)))


RANKS_DIFFER_BY_ROUNDING = Fault(
    name="ranks_differ_by_rounding",
    sentence="After DDP has averaged, odd ranks hold the next larger numbers.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_and_round),
)


# Each rank scales its gradients by a different number, and divides the average by that number.


SMALLEST_SCALE = 256.0


def scale_by_rank(record_firing: RecordFiring) -> Any:
    """Rank r scales by a constant times 2^r, averages, and divides by its own scale."""

    def reduce(bucket: GradBucket) -> Tensor:
        scale = SMALLEST_SCALE * 2 ** dist.get_rank()
        return all_reduce_mean(bucket.buffer().mul_(scale)).div_(scale)

    return ddp_hook(record_firing, reduce)


SCALER_DIFFERS_BETWEEN_RANKS = Fault(
    name="scaler_differs_between_ranks",
    sentence="Every rank has its own loss scale, and divides the averaged gradient by that scale.",
    break_torch=scale_by_rank,
)
