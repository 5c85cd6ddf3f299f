"""DistributedDataParallel as it comes: the loss of the own shard, gradients averaged over ranks."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.strategies.sharded_batch import Facts
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def breaks(facts: Facts) -> str | None:
    return facts.mean_over(facts.shards.indices)


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()

    def step(shard: Any) -> None:
        task.loss(ddp, shard).backward()

    return step


STRATEGY = Strategy(
    name="ddp_mean",
    promise="The average over ranks is the big batch if the loss is a mean and every rank's loss "
    "divides by the same number.",
    breaks=breaks,
    prepare=prepare,
)
