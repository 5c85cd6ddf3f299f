"""DDP with one loss over the outputs of all ranks, gathered with their gradient."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as collectives
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.strategies.sharded_batch import Facts
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


class Gathered(nn.Module):
    """Takes the inputs of all ranks, runs DDP on the own ones, and gives the outputs of all.

    ``sizes``: the examples of every rank.
    """

    def __init__(self, ddp: nn.Module, rank: int) -> None:
        super().__init__()
        self.ddp, self.rank = ddp, rank
        self.sizes: Sequence[int] = ()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        start = sum(self.sizes[: self.rank])
        own = slice(start, start + self.sizes[self.rank])
        arguments = pytree.tree_map_only(Tensor, lambda leaf: leaf[own], (inputs, named))
        outputs = self.ddp(*arguments[0], **arguments[1])
        return pytree.tree_map_only(Tensor, lambda leaf: gather(leaf, self.sizes), outputs)


def breaks(facts: Facts) -> str | None:
    return facts.apart()


def prepare(task: Task) -> TrainStep:
    gathered = Gathered(task.wrap(), task.rank.rank)

    def step(shard: Any) -> None:
        own = torch.tensor([count_examples(shard)], device=task.rank.device)
        gathered.sizes = gather(own, [1] * task.rank.world_size).tolist()
        batch = pytree.tree_map_only(Tensor, lambda leaf: gather(leaf, gathered.sizes), shard)
        # Every rank has the whole loss. Backward adds up what all of them say of the own outputs,
        # which is world size times its gradient, and DDP's average divides by that.
        task.loss(gathered, batch).backward()

    return step


def gather(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of all ranks, in the order of ranks, with their gradient; ``sizes``: of each rank.

    The collective takes equally many rows from each, so that shorter shards are filled up.
    """
    missing = max(sizes) - len(values)
    filled = torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
    with warnings.catch_warnings():
        # torch 2.13 advises another one, which the oldest supported torch does not have.
        warnings.simplefilter("ignore", FutureWarning)
        parts = collectives.all_gather(filled, group=dist.group.WORLD)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


STRATEGY = Strategy(
    name="ddp_gathered",
    promise="One loss over outputs gathered with their gradient is the big batch, for any loss "
    "and any shards.",
    breaks=breaks,
    prepare=prepare,
)
