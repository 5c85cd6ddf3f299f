"""Each rank's loss divides by its own number of examples, though shards are uneven."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep


def divide_by_own_count(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step with DDP and the mean loss over the rank's own examples."""
    ddp = task.wrap()

    def broken(shard: Any) -> None:
        task.loss(ddp, shard).backward()
        record_firing()

    return broken


FAULT = Fault(
    name="uneven_shards_weighted_equally",
    sentence="The global mean is replaced by the mean over each rank's own examples.",
    break_step=divide_by_own_count,
    strategies=("ddp_global_mean",),
    needs_unequal_divisors=True,
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    shards=("uneven", "one_example"),
    own_step="",
)
