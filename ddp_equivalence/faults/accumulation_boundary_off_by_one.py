"""The last micro-batch but one reduces; what comes after it stays local."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.strategies.sharded_batch import micro_batches
from ddp_equivalence.strategies.strategy import Task, TrainStep


def one_early(task: Task, step: TrainStep, fire: Fire) -> TrainStep:
    """DDP's loop over micro-batches, reducing one too early."""
    ddp = task.wrap()
    full_window = len(task.shards[0].indices[task.rank.rank])

    def broken(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard))), full_window)
        for number, indices in enumerate(window, start=1):
            with nullcontext() if number == len(window) - 1 else ddp.no_sync():
                (task.loss(ddp, take(shard, indices)) / len(window)).backward()
        fire()

    return broken


FAULT = Fault(
    name="accumulation_boundary_off_by_one",
    sentence="no_sync is left for the last micro-batch but one, and entered again for the last.",
    in_step=one_early,
    strategies=("ddp_accumulation",),
)
