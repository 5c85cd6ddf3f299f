"""DDP with a communication hook that adds up gradients and does not divide."""

# DDP compares the annotations of a hook with classes. So this file must not import annotations from
# __future__, which turns them into strings.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_summed(sharded_batch.shards.indices)


def sum_over_ranks(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce the bucket. A hook replaces DDP's own all-reduce and its division by world size.

    Source: torch documentation, "DDP Communication Hooks".
    """
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, async_op=True)

    def value(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return future.value()[0]

    summed: torch.futures.Future[Tensor] = work.get_future().then(value)
    return summed


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()
    ddp.register_comm_hook(None, sum_over_ranks)

    def step(shard: Any) -> None:
        task.loss(ddp, shard).backward()

    return step


STRATEGY = Strategy(
    name="ddp_sum_hook",
    promise="The sum over ranks is the gradient of the big batch if every term of the loss is a "
    "sum over examples.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
)
