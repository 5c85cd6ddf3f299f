"""No wrapper: the step all-reduces gradients itself after backward, to their mean or their sum."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_if_averaged(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_averaged(sharded_batch.shards.indices)


def cause_if_summed(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_summed(sharded_batch.shards.indices)


def prepare(task: Task, divide_by_world_size: bool) -> TrainStep:
    divisor = task.rank.world_size if divide_by_world_size else 1

    def step(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        reduce_gradients(task.model, divisor)

    return step


def reduce_gradients(
    model: nn.Module, divisor: int, group: dist.ProcessGroup | None = None
) -> None:
    """All-reduce every gradient in place to the sum over the group, and divide it by ``divisor``.

    A gradient that is None on some ranks counts as zero there. If it is None on all ranks, it stays
    None.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in trained])
    has_gradient = has_gradient.to(trained[0].device)
    dist.all_reduce(has_gradient, group=group)
    for parameter, ranks_with_gradient in zip(trained, has_gradient.tolist(), strict=True):
        if not ranks_with_gradient:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= divisor


MEAN = Strategy(
    name="manual_all_reduce_mean",
    promise="The sum over ranks, divided by the number of ranks, is the gradient of the big batch "
    "if the loss is a mean and every rank's loss divides by the same number.",
    cause_of_difference=cause_if_averaged,
    prepare=partial(prepare, divide_by_world_size=True),
)

SUM = Strategy(
    name="manual_all_reduce_sum",
    promise="The sum over ranks is the gradient of the big batch if every term of the loss is a "
    "sum over examples.",
    cause_of_difference=cause_if_summed,
    prepare=partial(prepare, divide_by_world_size=False),
)
