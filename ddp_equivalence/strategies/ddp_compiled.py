"""torch.compile around DDP, whose hooks reduce what a compiled backward pass computes."""

from __future__ import annotations

from typing import Any

import torch

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def prepare(task: Task) -> TrainStep:
    torch._dynamo.reset()  # else what this rank compiled before counts towards torch's limit
    # This backend needs no compiler of C++, and compiles the backward pass, too.
    compiled: Any = torch.compile(task.wrap(), backend="aot_eager")

    def step(shard: Any) -> None:
        task.loss(compiled, shard).backward()

    return step


STRATEGY = Strategy(
    name="ddp_compiled",
    promise="DDP's average over the ranks is the gradient of the big batch, compiled as in eager "
    "mode, if the loss is a mean and every rank's loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    compiles=True,
)
