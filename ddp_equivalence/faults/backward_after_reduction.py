"""Half of the loss is differentiated after DDP has reduced gradients."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep


def differentiate_twice(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that calls backward through DDP, and then through the model itself."""
    ddp = task.wrap()

    def broken(shard: Any) -> None:
        (task.loss(ddp, shard) / 2).backward()
        (task.loss(task.model, shard) / 2).backward()
        record_firing()

    return broken


FAULT = Fault(
    name="backward_after_reduction",
    sentence="After DDP has reduced gradients, half of the loss is differentiated without it.",
    break_step=differentiate_twice,
    strategies=("ddp_mean",),
    own_step="",
)
