"""DDP with ZeRO-1: every rank keeps the optimizer's state of its part of the parameters."""

from __future__ import annotations

from typing import Any

import torch

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def prepare(task: Task) -> TrainStep:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = task.wrap()
    optimizer = ZeroRedundancyOptimizer(
        task.model.parameters(), optimizer_class=torch.optim.SGD, lr=task.lr
    )

    def step(shard: Any) -> None:
        optimizer.zero_grad()
        task.loss(ddp, shard).backward()
        optimizer.step()

    return step


STRATEGY = Strategy(
    name="zero",
    promise="DDP averages the gradients, each rank steps its part of the parameters and sends them "
    "to all others. This is the update of the big batch if the loss is a mean and every rank's "
    "loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    trains=True,
)
