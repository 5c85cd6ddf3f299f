"""A strategy is one way of training data-parallel, with a promise about the gradients it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.build import loss_of
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.models.model import CatalogueModel
from ddp_equivalence.case.shards import Shards
from ddp_equivalence.case.training import Steps
from ddp_equivalence.ranks import Rank
from ddp_equivalence.strategies.sharded_batch import Indices, ShardedBatch

TrainStep = Callable[[Any], Mapping[str, Tensor | None] | None]
"""A train step takes the rank's examples of one step. It leaves gradients on the parameters of the
model, or returns them by name."""


@dataclass
class Task:
    """A task is everything that a strategy is given on one rank to make its train step from.

    ``shards`` has one entry for every step: the examples that each rank is assigned in it.
    ``steps`` says how the case's batch is divided into the big batches of these steps. A strategy
    writes evidence into ``notes`` that it really ran, such as the number of its replicas. ``lr`` is
    the learning rate of plain SGD, for strategies that train.
    """

    case: Case
    model: nn.Module
    rank: Rank
    shards: Sequence[Shards]
    notes: dict[str, Any] = field(default_factory=dict)
    steps: Steps = 1
    lr: float = 0.1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The value of the case's loss, as its user wrote it."""
        value: Tensor = loss_of(self.case)(model, batch)
        return value

    @property
    def may_leave_parameters_unused(self) -> bool:
        """True if some ranks may compute nothing with a parameter of the model."""
        model = self.case.model
        return isinstance(model, str) and MODELS[model].unused_on_some_ranks

    def wrap(self, model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
        """Wrap the model, or what was made of it, in DistributedDataParallel with these options.

        The caller must hold the wrapper until backward has ended: when it is freed, its hooks go
        with it, and nothing is reduced. Torch raises no error then.
        """
        devices = [self.rank.device] if self.rank.device.type == "cuda" else None
        return DistributedDataParallel(
            self.model if model is None else model,
            device_ids=devices,
            find_unused_parameters=self.may_leave_parameters_unused,
            **options,
        )


def whole_shards(sharded_batch: ShardedBatch) -> tuple[tuple[Indices, ...], ...]:
    """Each rank computes one loss, so that its only part is its whole shard."""
    return tuple((indices,) for indices in sharded_batch.shards.indices)


@dataclass(frozen=True)
class Strategy:
    """One strategy, and everything that the rest of the package has to know of it.

    A new strategy is one file that makes a ``Strategy``, and one line in ``STRATEGIES``.
    """

    name: str
    promise: str
    """The promise: one sentence that says where the gradient is that of the big batch, and why."""
    cause_of_difference: Callable[[ShardedBatch], str | None]
    """The promise as a function: None where it holds, else the public name of the cause."""
    prepare: Callable[[Task], TrainStep]
    """Is called once on each rank, and returns the train step."""
    one_process: bool = False
    """One process holds the whole batch and drives all replicas, one for each rank of a layout."""
    lane: str | None = None
    """The only lane that the strategy can run on; None if it needs no particular lane."""
    gpus_per_rank: int = 1
    """How many GPUs each rank drives, where the strategy needs GPUs."""
    splits_the_batch_itself: bool = False
    """Torch splits the batch into equal shards whatever the case says, so only those are tried."""
    accumulates: bool = False
    """Every rank cuts its shard into micro-batches, and adds up their gradients."""
    sums_in_nodes: bool = False
    """Gradients are added up inside each node, and averaged over the nodes."""
    needs_normalisers: bool = False
    """The strategy asks the loss what its terms divide by; only the catalogue's losses say that."""
    parts_by_rank: Callable[[ShardedBatch], tuple[tuple[Indices, ...], ...]] = whole_shards
    """The parts of the big batch on which each rank computes one loss: its whole shard, or its
    micro-batches."""
    tries_few_pairs: bool = False
    """Few pairs of model and loss are tried, because the rule depends on neither."""
    has_the_rule_of: str = ""
    """Another strategy, whose rule this one follows in another way of computing. What the rule
    depends on is tried with that one, and here what the way of computing depends on."""
    dtype: torch.dtype = torch.float64
    """The dtype of most cases that are tried."""
    compiles: bool = False
    """Torch compiles the step, which takes seconds on each rank, so that only two are tried."""
    tries_few_cases: bool = False
    """As few cases are tried, because the rule is that of another strategy with other parts."""
    trains: bool = False
    """The train step also steps with an optimizer of its own, which does what plain SGD does on one
    device. Its trials compare how far the weights have moved."""
    takes: Callable[[CatalogueModel], bool] = lambda model: True
    """Says which models of the catalogue can be trained so."""
    shards_parameters: bool = False
    """Outside the forward pass, a rank has nothing but its shards of the parameters."""
    needs_even_nodes: bool = False
    """All nodes must have equally many ranks."""
    needs_several_nodes: bool = False
    """All ranks of a node compute with the same examples, so that one node reduces nothing."""
    ends_without_examples: bool = False
    """A rank without examples has ended, and the others average without it. Where their average is
    another gradient than that of the big batch, this has no name of its own."""
    more_shards: tuple[tuple[str, str], ...] = ()
    """Layouts and shards that are tried with this strategy and no other."""

    @property
    def runs_forward_in_turn(self) -> bool:
        """True if one process runs several forward passes, one after the other, in one step."""
        return self.one_process or self.accumulates
