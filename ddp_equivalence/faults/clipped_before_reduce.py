"""Each rank clips its own gradient before the average."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep

SHARE = 0.6
"""Of the largest norm of a rank's gradient: so that it bites somewhere."""


def clipped(task: Task, step: TrainStep, fire: Fire) -> TrainStep:
    """Backward, clip, reduce: in the wrong order."""

    def broken(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        if task.rank.world_size == 1:
            return
        gradients = [one.grad for one in task.model.parameters() if one.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients).detach().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), SHARE * float(largest))
        fire()
        reduce_gradients(task.model, task.rank.world_size)

    return broken


FAULT = Fault(
    name="clipped_before_reduce",
    sentence="clip_grad_norm_ comes before the all-reduce, not after it.",
    in_step=clipped,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
)
