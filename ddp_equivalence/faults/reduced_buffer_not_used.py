"""A flat copy of the gradients is all-reduced, and nobody copies it back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep


def reduce_a_flat_copy(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that averages a flat buffer, and forgets it."""

    def broken(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        gradients = [
            parameter.grad for parameter in task.model.parameters() if parameter.grad is not None
        ]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= task.rank.world_size
        record_firing()

    return broken


FAULT = Fault(
    name="reduced_buffer_not_used",
    sentence="The step all-reduces a flat copy of the gradients, and does not copy it back.",
    break_step=reduce_a_flat_copy,
    strategies=("manual_all_reduce_mean",),
    own_step="",
)
