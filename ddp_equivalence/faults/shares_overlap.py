"""Every rank reads one example more than its share: the first one of the next rank."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep


def read_one_more(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """Run the step on the rank's own examples and the first of the next rank, if there is one."""
    batches = iter(zip(build_batches(task.case, task.steps), task.shards, strict=True))
    rank = task.rank

    def broken(shard: Any) -> Any:
        batch, shards = next(batches)
        examples = list(shards.indices[rank.rank])
        for following in shards.indices[rank.rank + 1 : rank.rank + 2]:
            examples += following[:1]
            record_firing()
        return step(move(take(batch, examples, task.case.batch_dims), rank.device))

    return broken


FAULT = Fault(
    name="shares_overlap",
    sentence="Every rank but the last one also reads the first example of the next rank.",
    break_step=read_one_more,
    acts_at=("forward",),
)
