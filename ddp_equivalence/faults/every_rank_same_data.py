"""Every rank trains on the examples of rank 0."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep


def give_examples_of_rank_0(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """Run the step on the examples of rank 0, on every rank."""
    batches = iter(zip(build_batches(task.case, task.steps), task.shards, strict=True))

    def broken(shard: Any) -> Any:
        batch, shards = next(batches)
        record_firing()
        return step(move(take(batch, shards.indices[0], task.case.batch_dims), task.rank.device))

    return broken


FAULT = Fault(
    name="every_rank_same_data",
    sentence="Every rank is given the examples of rank 0.",
    break_step=give_examples_of_rank_0,
    acts_at=("forward",),
)
