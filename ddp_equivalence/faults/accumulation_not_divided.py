"""Losses of micro-batches are not divided by their number."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.strategies.sharded_batch import micro_batches
from ddp_equivalence.strategies.strategy import Task, TrainStep


def not_divided(task: Task, step: TrainStep, fire: Fire) -> TrainStep:
    """DDP's loop over micro-batches, without the division."""
    ddp = task.wrap()
    full_window = len(task.shards[0].indices[task.rank.rank])

    def broken(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard))), full_window)
        for number, indices in enumerate(window, start=1):
            with nullcontext() if number == len(window) else ddp.no_sync():
                task.loss(ddp, take(shard, indices)).backward()
                fire()

    return broken


FAULT = Fault(
    name="accumulation_not_divided",
    sentence="A loop over micro-batches adds up their mean losses, and divides by nothing.",
    in_step=not_divided,
    hidden=lambda layout: None,
    strategies=("ddp_accumulation",),
)
