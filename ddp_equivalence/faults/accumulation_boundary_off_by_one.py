"""DDP reduces after the second-to-last micro-batch, and the last one stays local."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.sharded_batch import micro_batches
from ddp_equivalence.strategies.strategy import Task, TrainStep


def reduce_one_too_early(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A loop over micro-batches in which DDP reduces one micro-batch too early."""
    ddp = task.wrap()
    dims = task.case.batch_dims
    full_window = len(task.shards[0].indices[task.rank.rank])

    def broken(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard, dims))), full_window)
        for number, indices in enumerate(window, start=1):
            with nullcontext() if number == len(window) - 1 else ddp.no_sync():
                (task.loss(ddp, take(shard, indices, dims)) / len(window)).backward()
        record_firing()

    return broken


FAULT = Fault(
    name="accumulation_boundary_off_by_one",
    sentence="no_sync is off for the second-to-last micro-batch, and on for all others.",
    break_step=reduce_one_too_early,
    strategies=("ddp_accumulation",),
    own_step="",
)
