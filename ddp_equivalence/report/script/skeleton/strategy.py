"""What a strategy of the catalogue is given, and the step made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.skeleton.placeholders import (
    DEALS,
    LOSS,
    LOSS_NAME,
    RANKS_OF_NODE,
    UNUSED_PARAMETERS,
    loss,
    prepare,
)


class Task:
    """What the strategy is given on a rank."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model, self.rank = model, rank

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch)

    def wrap(self) -> DistributedDataParallel:
        devices = [self.rank.device] if self.rank.device.type == "cuda" else None
        return DistributedDataParallel(
            self.model, device_ids=devices, find_unused_parameters=UNUSED_PARAMETERS
        )


class WideTask(Task):
    """It also knows which examples every rank is given, and which ranks share a node."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        super().__init__(model, rank)
        self.shards = [Shards(indices) for indices in DEALS]
        self.case = SimpleNamespace(ranks=Layout(), loss=LOSS_NAME)
        self.notes: dict[str, Any] = {}


class Shards:
    """``indices[r]`` are the examples of rank r."""

    def __init__(self, indices: Sequence[Sequence[int]]) -> None:
        self.indices = indices
        self.sizes = tuple(map(len, indices))


class Layout:
    """Which ranks live on which node."""

    nodes = len(RANKS_OF_NODE)
    world_size = sum(map(len, RANKS_OF_NODE))

    def ranks_on(self, node: int) -> tuple[int, ...]:
        return RANKS_OF_NODE[node]


Step = Callable[[Any], Mapping[str, Tensor | None] | None]


@cache
def prepared(model: nn.Module, rank: Rank) -> Step:
    """Made once for all steps, as a wrapper is."""
    made: Step = prepare(Task(model, rank))
    return made


@cache
def widely_prepared(model: nn.Module, rank: Rank) -> Step:
    """Made once for all steps, as a wrapper is."""
    made: Step = prepare(WideTask(model, rank))
    return made


def step(model: nn.Module, shard: Any, rank: Rank) -> Mapping[str, Tensor | None] | None:
    return prepared(model, rank)(shard)


def wide_step(model: nn.Module, shard: Any, rank: Rank) -> Mapping[str, Tensor | None] | None:
    return widely_prepared(model, rank)(shard)


def catalogue_loss_of(case: Any, needed_by: str) -> Any:
    """The loss in parts: its terms before any division, and what each divides by."""
    return LOSS


def count_examples(batch: Any) -> int:
    leaves = [one for one in pytree.tree_leaves(batch) if isinstance(one, torch.Tensor)]
    return len(leaves[0])


def keep_group(group: dist.ProcessGroup) -> None:
    """Nothing here destroys a group."""
