"""Gradients are clipped before the loss scale is taken out of them."""

from __future__ import annotations

from typing import Any

import torch

from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep

SCALE = 1024.0

TIMES_THE_NORM = 3.3
"""The limit is so many times the norm of the gradients themselves, which are thus never to be
clipped."""


def clip_while_scaled(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step with a loss scale that is taken out after the gradients have been clipped."""

    def broken(shard: Any) -> None:
        parameters = list(task.model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        scaler.scale(task.loss(task.model, shard)).backward()
        reduce_gradients(task.model, task.rank.world_size)
        gradients = [one.grad for one in parameters if one.grad is not None]
        scaled_norm = float(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grad_norm_(parameters, TIMES_THE_NORM * scaled_norm / SCALE)
        record_firing()
        scaler.unscale_(optimizer)

    return broken


FAULT = Fault(
    name="clipped_while_scaled",
    sentence="clip_grad_norm_ comes before GradScaler.unscale_, not after it.",
    break_step=clip_while_scaled,
    why_it_cannot_show=shows_everywhere,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)
