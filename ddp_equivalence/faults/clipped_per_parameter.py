"""Each parameter's gradient is clipped by its own norm."""

from __future__ import annotations

from typing import Any

import torch

from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.strategy import Task, TrainStep

SHARE_OF_LARGEST_NORM = 0.4
"""Gradients are clipped to this share of the largest norm of a parameter, so that some are."""


def clip_each(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """Run the step, and clip one parameter after the other."""

    def broken(shard: Any) -> Any:
        result = step(shard)
        trained = [one for one in task.model.parameters() if one.grad is not None]
        norms = [float(one.grad.norm()) for one in trained if one.grad is not None]
        for parameter in trained:
            torch.nn.utils.clip_grad_norm_(parameter, SHARE_OF_LARGEST_NORM * max(norms))
        record_firing()
        return result

    return broken


FAULT = Fault(
    name="clipped_per_parameter",
    sentence="After the reduction, clip_grad_norm_ is called for one parameter after the other.",
    break_step=clip_each,
    why_it_cannot_show=shows_everywhere,
    strategies=("manual_all_reduce_mean", "ddp_mean"),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)
