"""Plain DistributedDataParallel: the loss of each rank's shard, gradients averaged over ranks."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_averaged(sharded_batch.shards.indices)


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()

    def step(shard: Any) -> None:
        task.loss(ddp, shard).backward()

    return step


STRATEGY = Strategy(
    name="ddp_mean",
    promise="The average over ranks is the gradient of the big batch if the loss is a mean and "
    "every rank's loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
)
