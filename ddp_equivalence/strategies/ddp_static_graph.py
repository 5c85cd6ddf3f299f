"""DDP with static_graph=True, which learns in the first backward pass which parameters are used."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap(static_graph=True)

    def step(shard: Any) -> None:
        task.loss(ddp, shard).backward()

    return step


STRATEGY = Strategy(
    name="ddp_static_graph",
    promise="DDP's average over the ranks is the gradient of the big batch, with a static graph as "
    "without one, if the loss is a mean and every rank's loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    takes=lambda model: not model.unused_on_some_ranks,
)
