"""All gradients have one wrong factor: a sum where a mean is meant, or another divisor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.changed_ddp import all_reduce_mean, all_reduce_sum, ddp_hook
from ddp_equivalence.faults.changed_sums import after_each_sum
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.faults.rank_and_node import local_world_size
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep

# The mean over all ranks is divided by the number of ranks once more.


def divide_mean_again(bucket: GradBucket) -> Tensor:
    """The mean over all ranks, divided by the number of ranks."""
    return all_reduce_mean(bucket.buffer()).div_(dist.get_world_size())


AVERAGED_TWICE = Fault(
    name="averaged_twice",
    sentence="DDP's communication hook divides the average by the number of ranks once more.",
    break_torch=lambda record_firing: ddp_hook(record_firing, divide_mean_again),
)


# The sum over all ranks is divided by the number of ranks on one node.


def why_it_cannot_show(layout: Layout) -> str | None:
    """On a single node, the local world size is the world size."""
    return "all ranks are on one node" if layout.nodes == 1 else None


DIVIDED_BY_LOCAL_WORLD_SIZE = Fault(
    name="divided_by_local_world_size",
    sentence="DDP's communication hook divides the sum by LOCAL_WORLD_SIZE.",
    break_torch=lambda record_firing: ddp_hook(
        record_firing, lambda bucket: all_reduce_sum(bucket.buffer()).div_(local_world_size())
    ),
    why_it_cannot_show=why_it_cannot_show,
)


# The sum over all ranks is divided by a world size of another run.


MORE_RANKS = 3
"""The other run had this many more ranks. With twice as many, other causes leave the same factor.
"""


def divide_by_another_number(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that divides the sum of the gradients by the world size of a larger run."""

    def broken(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        record_firing()
        reduce_gradients(task.model, task.rank.world_size + MORE_RANKS)

    return broken


DIVIDED_BY_WRONG_NUMBER = Fault(
    name="divided_by_wrong_number",
    sentence="The sum over the ranks is divided by the world size of another run.",
    break_step=divide_by_another_number,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)


# ``torch.distributed.all_reduce`` returns the mean where the caller asks for the sum.


def average_sums(record_firing: RecordFiring) -> AbstractContextManager[None]:
    """``dist.all_reduce`` of gradients returns the mean where the caller asks for the sum."""

    def divide(sum_again: Callable[[], Any], tensor: Tensor) -> None:
        tensor.div_(dist.get_world_size())

    return after_each_sum(record_firing, divide)


MEAN_NOT_SUM = Fault(
    name="mean_not_sum",
    sentence="torch.distributed.all_reduce divides its sum by the number of ranks.",
    break_torch=average_sums,
    strategies=("ddp_sum_hook",),
    pairs=(("mlp", "mse_sum"), ("conv", "cross_entropy_sum"), ("gru_tied", "token_sum")),
    shards=("equal", "uneven"),
    own_step="by_hand",
    acts_at=("all_reduce",),
)


# DDP adds up the gradients of all ranks, and does not divide the sum.


SUM_NOT_MEAN = Fault(
    name="sum_not_mean",
    sentence="DDP's communication hook adds up gradients and does not divide.",
    break_torch=lambda record_firing: ddp_hook(
        record_firing, lambda bucket: all_reduce_sum(bucket.buffer())
    ),
)
