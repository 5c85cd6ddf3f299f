"""All gradients are reduced as soon as the first gradient is ready."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep


def reduce_too_early(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that reduces gradients inside backward."""
    trained = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    not_reduced: list[bool] = []

    def reduce_all(parameter: Tensor) -> None:
        if not_reduced:
            not_reduced.clear()
            reduce_gradients(task.model, task.rank.world_size)
            record_firing()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(reduce_all)

    def broken(shard: Any) -> None:
        not_reduced.append(True)
        task.loss(task.model, shard).backward()

    return broken


FAULT = Fault(
    name="reduced_before_backward_finished",
    sentence="As soon as the first gradient is ready, a hook reduces all gradients.",
    break_step=reduce_too_early,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)
