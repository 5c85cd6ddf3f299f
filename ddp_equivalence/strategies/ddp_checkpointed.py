"""DDP around a model whose layers are computed again in backward (activation checkpointing)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def prepare(task: Task) -> TrainStep:
    for child in task.model.children():
        _checkpoint(child)
    ddp = task.wrap()

    def step(shard: Any) -> None:
        task.loss(ddp, shard).backward()

    return step


def _checkpoint(module: nn.Module) -> None:
    """Let the module compute its forward pass once more in backward, and keep nothing of it."""
    forward = module.forward

    def again(*inputs: Any, **options: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    module.forward = again


STRATEGY = Strategy(
    name="ddp_checkpointed",
    promise="DDP's average over the ranks is the gradient of the big batch, with checkpointed "
    "activations as without, if the loss is a mean and every rank's loss divides by the same "
    "number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
)
