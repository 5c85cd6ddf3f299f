"""All gradients are reduced as soon as the first of them is ready."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep


def too_early(task: Task, step: TrainStep, fire: Fire) -> TrainStep:
    """The reduction runs inside backward."""
    trained = [one for one in task.model.parameters() if one.requires_grad]
    waiting: list[bool] = []

    def ready(parameter: Tensor) -> None:
        if waiting:
            waiting.clear()
            reduce_gradients(task.model, task.rank.world_size)
            fire()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(ready)

    def broken(shard: Any) -> None:
        waiting.append(True)
        task.loss(task.model, shard).backward()

    return broken


FAULT = Fault(
    name="reduced_before_backward_finished",
    sentence="A hook of the first gradient that is ready reduces all of them.",
    in_step=too_early,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
)
