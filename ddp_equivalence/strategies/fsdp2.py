"""FSDP2: fully_shard on every layer and on the model, over all ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def prepare(task: Task) -> TrainStep:
    shard_layers(task.model)

    def step(shard: Any) -> None:
        task.loss(task.model, shard).backward()

    return step


def shard_layers(model: nn.Module, **options: Any) -> None:
    """Shard every child module that has parameters of its own alone, and then the model.

    Parameters that several modules share stay with the model, which gathers them for all; so do
    those of embeddings, whose weights a model may read for its outputs.
    """
    from torch.distributed.fsdp import fully_shard  # which takes half a second to import

    for child in model.children():
        own = [id(one) for one in child.parameters()]
        others = {
            id(one)
            for other in model.children()
            if other is not child
            for one in other.parameters()
        }
        if own and others.isdisjoint(own) and not isinstance(child, nn.Embedding):
            fully_shard(child, **options)
    fully_shard(model, **options)


STRATEGY = Strategy(
    name="fsdp2",
    promise="FSDP averages the gradients over the ranks and leaves each rank its shard; together "
    "the shards are the gradient of the big batch if the loss is a mean and every rank's loss "
    "divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    takes=lambda model: model.can_be_sharded,
    shards_parameters=True,
)
