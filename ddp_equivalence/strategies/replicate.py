"""torch.distributed._composable.replicate: DDP's reduction without a wrapper around the model."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def prepare(task: Task) -> TrainStep:
    from torch.distributed._composable.replicate import replicate

    replicate(task.model, find_unused_parameters=task.may_leave_parameters_unused)

    def step(shard: Any) -> None:
        task.loss(task.model, shard).backward()

    return step


STRATEGY = Strategy(
    name="replicate",
    promise="The average over the ranks is the gradient of the big batch if the loss is a mean and "
    "every rank's loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    takes=lambda model: not model.sparse_gradients,
)
