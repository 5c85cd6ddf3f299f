"""Each rank clips its own gradient before gradients are averaged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep

SHARE_OF_LARGEST_NORM = 0.6
"""Gradients are clipped to this share of the largest gradient norm of any rank, so that at least
one rank clips."""


def clip_before_reducing(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that clips after backward and reduces afterwards."""

    def broken(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        if task.rank.world_size == 1:
            return
        gradients = [
            parameter.grad for parameter in task.model.parameters() if parameter.grad is not None
        ]
        largest = torch.nn.utils.get_total_norm(gradients).detach().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        torch.nn.utils.clip_grad_norm_(
            task.model.parameters(), SHARE_OF_LARGEST_NORM * float(largest)
        )
        record_firing()
        reduce_gradients(task.model, task.rank.world_size)

    return broken


FAULT = Fault(
    name="clipped_before_reduce",
    sentence="clip_grad_norm_ comes before the all-reduce, not after it.",
    break_step=clip_before_reducing,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)
