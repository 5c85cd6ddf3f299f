"""The losses of micro-batches are divided by one more than there are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.sharded_batch import micro_batches
from ddp_equivalence.strategies.strategy import Task, TrainStep


def divide_as_a_longer_window(
    task: Task, step: TrainStep, record_firing: RecordFiring
) -> TrainStep:
    """A loop over micro-batches that divides their losses as if there were one more."""
    ddp = task.wrap()
    dims = task.case.batch_dims
    full_window = len(task.shards[0].indices[task.rank.rank])

    def broken(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard, dims))), full_window)
        for number, indices in enumerate(window, start=1):
            with nullcontext() if number == len(window) else ddp.no_sync():
                (task.loss(ddp, take(shard, indices, dims)) / (len(window) + 1)).backward()
                record_firing()

    return broken


FAULT = Fault(
    name="last_window_divided_by_full",
    sentence="A window of micro-batches is divided as if it had one more.",
    break_step=divide_as_a_longer_window,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_accumulation",),
    own_step="",
)
