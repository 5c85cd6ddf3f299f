"""The loss divides by the rank's own examples, of which each has another number."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.strategies.strategy import Task, TrainStep


def own_divisor(task: Task, step: TrainStep, fire: Fire) -> TrainStep:
    """DDP with the loss as its user wrote it, over the rank's own examples."""
    ddp = task.wrap()

    def broken(shard: Any) -> None:
        task.loss(ddp, shard).backward()
        fire()

    return broken


FAULT = Fault(
    name="uneven_shards_weighted_equally",
    sentence="The global mean is replaced by the mean over each rank's own examples.",
    in_step=own_divisor,
    strategies=("ddp_global_mean",),
    of_counts=True,
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    shards=("uneven", "one_example"),
)
