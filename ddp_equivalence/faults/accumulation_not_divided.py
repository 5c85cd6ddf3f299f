"""The losses of micro-batches are not divided by the number of micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.sharded_batch import micro_batches
from ddp_equivalence.strategies.strategy import Task, TrainStep


def add_undivided_losses(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A loop over micro-batches that adds up their losses as they are."""
    ddp = task.wrap()
    dims = task.case.batch_dims
    full_window = len(task.shards[0].indices[task.rank.rank])

    def broken(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard, dims))), full_window)
        for number, indices in enumerate(window, start=1):
            with nullcontext() if number == len(window) else ddp.no_sync():
                task.loss(ddp, take(shard, indices, dims)).backward()
                record_firing()

    return broken


FAULT = Fault(
    name="accumulation_not_divided",
    sentence="A loop over micro-batches adds up their mean losses, and does not divide the sum.",
    break_step=add_undivided_losses,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_accumulation",),
    own_step="",
)
