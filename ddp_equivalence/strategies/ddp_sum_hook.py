"""DDP with a communication hook that sums: gradients are added up and never divided."""

# No "from __future__ import annotations": DDP compares a hook's annotations with classes, not text.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.strategies.sharded_batch import Facts
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def breaks(facts: Facts) -> str | None:
    return facts.sum_over(facts.shards.indices)


def sum_over_ranks(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A hook replaces DDP's own all-reduce, and with it the division by the world size.

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
    promise="The sum over ranks is the big batch if every term of the loss is a sum over examples.",
    breaks=breaks,
    prepare=prepare,
)
