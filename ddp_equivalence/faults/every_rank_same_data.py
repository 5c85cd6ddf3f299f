"""Every rank reads the examples of rank 0."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.strategies.strategy import Task, TrainStep


def of_rank_0(task: Task, step: TrainStep, fire: Fire) -> TrainStep:
    """The step on the examples of rank 0."""
    batches = iter(zip(build_batches(task.case, task.steps), task.shards, strict=True))

    def broken(shard: Any) -> Any:
        batch, deal = next(batches)
        fire()
        return step(move(take(batch, deal.indices[0]), task.rank.device))

    return broken


FAULT = Fault(
    name="every_rank_same_data",
    sentence="Every rank is given the examples of rank 0.",
    in_step=of_rank_0,
)
