"""DDP with uneven inputs: ranks without examples have ended, and shadow the others' collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Join

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_averaged([part for part in sharded_batch.shards.indices if part])


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=task.lr)

    def step(shard: Any) -> None:
        # Torch's default divides by the initial world size, as if a rank that has ended had a
        # gradient of zero. The optimizer steps inside, because a rank that has ended is left no
        # gradients: at the end it is sent the weights.
        # Source: torch documentation, DistributedDataParallel.join.
        with Join([ddp], divide_by_initial_world_size=False):
            if count_examples(shard):
                optimizer.zero_grad()
                task.loss(ddp, shard).backward()
                optimizer.step()

    return step


STRATEGY = Strategy(
    name="ddp_join",
    promise="The average over the ranks that have examples is the gradient of the big batch if the "
    "loss is a mean and the loss of each of these ranks divides by the same number; the ranks "
    "without examples are sent the weights.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    tries_few_cases=True,
    trains=True,
    ends_without_examples=True,
    more_shards=(("1x4", "5+5+5+0"), ("1+3", "0+9+9+0"), ("2x2", "10+10+0+0")),
)
