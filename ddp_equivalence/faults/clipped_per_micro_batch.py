"""Gradients are clipped after each micro-batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.sharded_batch import micro_batches
from ddp_equivalence.strategies.strategy import Task, TrainStep

SHARE_OF_LARGEST_NORM = 0.6
"""Gradients are clipped to this share of the largest norm after the first micro-batch."""


def clip_in_the_loop(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A loop over micro-batches that clips what has been added up so far."""
    ddp = task.wrap()
    dims = task.case.batch_dims
    full_window = len(task.shards[0].indices[task.rank.rank])

    def broken(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard, dims))), full_window)
        max_norm: float | None = None
        for number, indices in enumerate(window, start=1):
            with nullcontext() if number == len(window) else ddp.no_sync():
                (task.loss(ddp, take(shard, indices, dims)) / len(window)).backward()
            if max_norm is None:
                max_norm = SHARE_OF_LARGEST_NORM * _largest_norm(task)
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), max_norm)
            record_firing()

    return broken


def _largest_norm(task: Task) -> float:
    """The largest norm of any rank's gradient."""
    gradients = [one.grad for one in task.model.parameters() if one.grad is not None]
    largest = torch.nn.utils.get_total_norm(gradients).detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


FAULT = Fault(
    name="clipped_per_micro_batch",
    sentence="clip_grad_norm_ is called after each micro-batch, not after the last one.",
    break_step=clip_in_the_loop,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_accumulation",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)
