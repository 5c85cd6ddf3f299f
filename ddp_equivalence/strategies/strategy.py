"""A strategy: a way to leave the gradient of the big batch on every rank, and its promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.build import loss_of
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.shards import Shards
from ddp_equivalence.case.steps import Steps
from ddp_equivalence.ranks import Rank
from ddp_equivalence.strategies.sharded_batch import Facts, Indices

TrainStep = Callable[[Any], Mapping[str, Tensor | None] | None]
"""Takes the rank's examples of one step and leaves gradients on the model's parameters, or returns
them by name."""


@dataclass
class Task:
    """What a strategy gets on a rank.

    ``shards`` has the deal of every step, of as many big batches as ``steps`` says. A strategy that
    proves it ran writes into ``notes``.
    """

    case: Case
    model: nn.Module
    rank: Rank
    shards: Sequence[Shards]
    notes: dict[str, Any] = field(default_factory=dict)
    steps: Steps = 1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The case's loss as its user wrote it."""
        value: Tensor = loss_of(self.case)(model, batch)
        return value

    def wrap(self) -> DistributedDataParallel:
        """The model in DistributedDataParallel. Hold it until after backward: without it nothing
        is reduced, and without an error.
        """
        model = self.case.model
        unused = isinstance(model, str) and MODELS[model].unused_on_some_ranks
        devices = [self.rank.device] if self.rank.device.type == "cuda" else None
        return DistributedDataParallel(
            self.model, device_ids=devices, find_unused_parameters=unused
        )


def each_rank(facts: Facts) -> tuple[tuple[Indices, ...], ...]:
    """Every rank contributes one gradient, of its whole shard."""
    return tuple((indices,) for indices in facts.shards.indices)


@dataclass(frozen=True)
class Strategy:
    """One entry of the table.

    ``promise`` in words, and ``breaks(facts)`` as a predicate: None where it holds, else the
    public name of the cause. ``prepare(task)`` is called once on each rank and returns the train
    step. ``one_process``: one process drives all replicas, the layout's ranks. ``lane``: what the
    machine must have beyond ranks. ``sums_in_nodes``: gradients
    are added up inside nodes, and averaged over them. ``contributions``: per rank, the parts of the
    big batch of which it averages the gradients.
    """

    name: str
    promise: str
    breaks: Callable[[Facts], str | None]
    prepare: Callable[[Task], TrainStep]
    one_process: bool = False
    lane: str | None = None
    sums_in_nodes: bool = False
    contributions: Callable[[Facts], tuple[tuple[Indices, ...], ...]] = each_rank
