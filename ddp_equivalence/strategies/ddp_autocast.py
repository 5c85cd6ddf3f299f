"""DDP under autocast: the forward pass runs in bfloat16 where torch thinks it right."""

from __future__ import annotations

from typing import Any

import torch

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()

    def step(shard: Any) -> None:
        with torch.autocast(task.rank.device.type, dtype=torch.bfloat16):
            loss = task.loss(ddp, shard)
        loss.backward()

    return step


STRATEGY = Strategy(
    name="ddp_autocast",
    promise="DDP's average over the ranks is the gradient of the big batch, up to the rounding of "
    "the precision that autocast chooses, if the loss is a mean and every rank's loss divides by "
    "the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    # In float64, autocast changes nothing.
    dtype=torch.float32,
)
