"""The step of a strategy from the catalogue, and the task that the strategy gets."""

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
from ddp_equivalence.report.script.template.placeholders import (
    CASE_SHARDS,
    LOSS,
    LOSS_NAME,
    RANKS_OF_NODE,
    UNUSED_PARAMETERS,
    loss,
    prepare,
)


class Task:
    """What the strategy gets on a rank: the model, the rank and the loss."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model, self.rank = model, rank

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch)

    def wrap(self) -> DistributedDataParallel:
        devices = [self.rank.device] if self.rank.device.type == "cuda" else None
        return DistributedDataParallel(
            self.model, device_ids=devices, find_unused_parameters=UNUSED_PARAMETERS
        )


class TaskWithCase(Task):
    """A task that also has the examples of every rank and the ranks of every node."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        super().__init__(model, rank)
        self.shards = [Shards(indices) for indices in CASE_SHARDS]
        self.case = SimpleNamespace(ranks=Layout(), loss=LOSS_NAME)
        self.notes: dict[str, Any] = {}


class Shards:
    """``indices[r]`` are the examples of rank r."""

    def __init__(self, indices: Sequence[Sequence[int]]) -> None:
        self.indices = indices
        self.sizes = tuple(map(len, indices))


class Layout:
    """The ranks of every node."""

    nodes = len(RANKS_OF_NODE)
    world_size = sum(map(len, RANKS_OF_NODE))

    def ranks_on(self, node: int) -> tuple[int, ...]:
        return RANKS_OF_NODE[node]


Step = Callable[[Any], Mapping[str, Tensor | None] | None]


@cache
def prepared(model: nn.Module, rank: Rank) -> Step:
    """The strategy is prepared once for all steps, since it may wrap the model."""
    return prepare(Task(model, rank))  # type: ignore[no-any-return]


@cache
def prepared_with_case(model: nn.Module, rank: Rank) -> Step:
    """The strategy is prepared once for all steps, since it may wrap the model."""
    return prepare(TaskWithCase(model, rank))  # type: ignore[no-any-return]


def step(model: nn.Module, shard: Any, rank: Rank) -> Mapping[str, Tensor | None] | None:
    return prepared(model, rank)(shard)


def step_with_case(model: nn.Module, shard: Any, rank: Rank) -> Mapping[str, Tensor | None] | None:
    return prepared_with_case(model, rank)(shard)


def catalogue_loss_of(case: Any, needed_by: str) -> Any:
    """The totals of the loss before any division, and what each total is divided by."""
    return LOSS


def count_examples(batch: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return len(tensors[0])


def keep_group(group: dist.ProcessGroup) -> None:
    """Nothing to do: this script never destroys a group."""
