"""The sum over all ranks is divided by a world size of another run."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep

MORE_RANKS = 3
"""The other run had this many more ranks. With twice as many, other causes leave the same factor.
"""


def divide_by_another_number(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that divides the sum of the gradients by the world size of a larger run."""

    def broken(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        record_firing()
        reduce_gradients(task.model, task.rank.world_size + MORE_RANKS)

    return broken


FAULT = Fault(
    name="divided_by_wrong_number",
    sentence="The sum over the ranks is divided by the world size of another run.",
    break_step=divide_by_another_number,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)
