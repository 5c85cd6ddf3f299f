"""DDP with one loss over the outputs of all ranks, gathered so that gradients flow back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as collectives

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


class Gathered(nn.Module):
    """Takes the inputs of all ranks, runs DDP on this rank's inputs, and gathers all outputs.

    The caller sets ``sizes``, the number of examples on every rank, before each call.
    """

    def __init__(self, ddp: nn.Module, rank: int) -> None:
        super().__init__()
        self.ddp, self.rank = ddp, rank
        self.sizes: Sequence[int] = ()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        start = sum(self.sizes[: self.rank])
        own = slice(start, start + self.sizes[self.rank])
        arguments = map_tensors(lambda leaf: leaf[own], (inputs, named))
        outputs = self.ddp(*arguments[0], **arguments[1])
        return map_tensors(lambda leaf: gather(leaf, self.sizes), outputs)


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_outputs_are_gathered()


def prepare(task: Task) -> TrainStep:
    gathered = Gathered(task.wrap(), task.rank.rank)

    def step(shard: Any) -> None:
        batch, gathered.sizes = gathered_batch(shard, task.rank.device)
        # Every rank computes the loss of the big batch. In backward, each rank's outputs get the
        # sum of the gradients from all ranks, which is world size times the gradient. DDP's
        # average divides by the world size again.
        task.loss(gathered, batch).backward()

    return step


def gathered_batch(
    shard: Any, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[Any, Sequence[int]]:
    """The examples of all ranks of the group, and how many each of them has."""
    own = torch.tensor([count_examples(shard)], device=device)
    sizes = gather(own, [1] * dist.get_world_size(group), group).tolist()
    return map_tensors(lambda leaf: gather(leaf, sizes, group), shard), sizes


def gather(values: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """Join the values of all ranks along dim 0, in the order of ranks, so that gradients flow back.

    Rank r has ``sizes[r]`` values along dim 0. The collective needs equally many from each rank, so
    shorter tensors are padded with zeros, which are removed afterwards.
    """
    missing = max(sizes) - len(values)
    padded = torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
    with warnings.catch_warnings():
        # torch 2.13 advises another function, which the oldest supported torch does not have.
        warnings.simplefilter("ignore", FutureWarning)
        parts = collectives.all_gather(padded, group=group or dist.group.WORLD)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


STRATEGY = Strategy(
    name="ddp_gathered",
    promise="One loss over all outputs, gathered so that gradients flow back, gives the gradient "
    "of the big batch for any loss and any shards.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    tries_few_pairs=True,
)
