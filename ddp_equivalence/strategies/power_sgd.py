"""DDP with the PowerSGD hook: after some steps it all-reduces approximations of low rank."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep

WHOLE_STEPS = 4
"""So many steps reduce whole gradients. Torch demands two at least, and has a default of 1,000."""


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()
    ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=WHOLE_STEPS), powerSGD_hook)

    def step(shard: Any) -> None:
        task.loss(ddp, shard).backward()

    return step


STRATEGY = Strategy(
    name="power_sgd",
    promise="In its first steps DDP averages whole gradients, which gives those of the big batch "
    "if the loss is a mean and every rank's loss divides by the same number; after these it "
    "averages approximations of low rank, which are other gradients.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    # Torch's hooks take no sparse gradients.
    takes=lambda model: not model.sparse_gradients,
)
