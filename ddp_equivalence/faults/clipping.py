"""Gradients are clipped before they are whole, reduced or unscaled, or in parts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.sharded_batch import micro_batches
from ddp_equivalence.strategies.strategy import Task, TrainStep

# Each rank clips its own gradient before gradients are averaged.


SHARE_OF_LARGEST_NORM = 0.6
"""Gradients are clipped to this share of the largest gradient norm of any rank, or of the largest
norm after the first micro-batch, so that at least one rank clips."""


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


CLIPPED_BEFORE_REDUCE = Fault(
    name="clipped_before_reduce",
    sentence="clip_grad_norm_ comes before the all-reduce, not after it.",
    break_step=clip_before_reducing,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)


# Gradients are clipped after each micro-batch.


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


CLIPPED_PER_MICRO_BATCH = Fault(
    name="clipped_per_micro_batch",
    sentence="clip_grad_norm_ is called after each micro-batch, not after the last one.",
    break_step=clip_in_the_loop,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_accumulation",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)


# Each parameter's gradient is clipped by its own norm.


SHARE_OF_LARGEST_NORM_OF_A_PARAMETER = 0.4
"""Gradients are clipped to this share of the largest norm of a parameter, so that some are."""


def clip_each(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """Run the step, and clip one parameter after the other."""

    def broken(shard: Any) -> Any:
        result = step(shard)
        trained = [one for one in task.model.parameters() if one.grad is not None]
        norms = [float(one.grad.norm()) for one in trained if one.grad is not None]
        for parameter in trained:
            torch.nn.utils.clip_grad_norm_(
                parameter, SHARE_OF_LARGEST_NORM_OF_A_PARAMETER * max(norms)
            )
        record_firing()
        return result

    return broken


CLIPPED_PER_PARAMETER = Fault(
    name="clipped_per_parameter",
    sentence="After the reduction, clip_grad_norm_ is called for one parameter after the other.",
    break_step=clip_each,
    why_it_cannot_show=shows_everywhere,
    strategies=("manual_all_reduce_mean", "ddp_mean"),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)


# Gradients are clipped before the loss scale is taken out of them.


SCALE = 1024.0

TIMES_THE_NORM = 3.3
"""The limit is so many times the norm of the gradients themselves, which are thus never to be
clipped."""


def clip_while_scaled(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step with a loss scale that is taken out after the gradients have been clipped."""

    def broken(shard: Any) -> None:
        parameters = list(task.model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        scaler.scale(task.loss(task.model, shard)).backward()
        reduce_gradients(task.model, task.rank.world_size)
        gradients = [one.grad for one in parameters if one.grad is not None]
        scaled_norm = float(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grad_norm_(parameters, TIMES_THE_NORM * scaled_norm / SCALE)
        record_firing()
        scaler.unscale_(optimizer)

    return broken


CLIPPED_WHILE_SCALED = Fault(
    name="clipped_while_scaled",
    sentence="clip_grad_norm_ comes before GradScaler.unscale_, not after it.",
    break_step=clip_while_scaled,
    why_it_cannot_show=shows_everywhere,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)
