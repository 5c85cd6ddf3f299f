"""What is known of one step before any rank runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.strategies.sharded_batch import Indices


@dataclass(frozen=True)
class Setting:
    """One step of a case: which ranks train which model on which examples.

    ``batch``: the big batch of the step, and ``example_count`` the number of its examples.
    ``earlier_batches``: the big batches of the steps before it. The weights were still right after
    those steps. ``shards``: the examples that each rank was given, None where the step takes its
    own. ``reporting_ranks``: the ranks that send gradients; a single process may drive all ranks of
    the layout, and then only rank 0 does.

    ``dtype``: the least precise dtype of a parameter. ``seed``: torch is seeded with it before the
    step. ``scale``: predicted gradients are multiplied by it: 1 for gradients, -lr for updates.
    ``sums_in_nodes``: the strategy adds gradients up inside each node and averages these sums.
    ``batch_coupled``: the name of the cause that applies where the loss couples the examples of a
    batch. ``draws_on_cpu``: the ranks draw random numbers on the CPU, as predictions do.
    ``divisor_candidates``: name -> number that a mean over the big batch may divide by.
    """

    case: Case
    layout: Layout
    batch: object
    example_count: int
    earlier_batches: tuple[object, ...]
    shards: tuple[Indices, ...] | None
    reporting_ranks: tuple[int, ...]
    lr: float
    dtype: torch.dtype
    seed: int
    has_batch_norm: bool
    has_dropout: bool
    batch_coupled: str | None = None
    sums_in_nodes: bool = False
    scale: float = 1.0
    draws_on_cpu: bool = True
    divisor_candidates: Mapping[str, float] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def every_rank_reports(self) -> bool:
        return len(self.reporting_ranks) == self.world_size

    @property
    def ranks_by_node(self) -> list[tuple[int, ...]]:
        """The ranks of every node."""
        return [self.layout.ranks_on(node) for node in range(self.layout.nodes)]

    @property
    def step(self) -> int:
        """The number of the step, from 0."""
        return len(self.earlier_batches)

    @property
    def first_example(self) -> int:
        """The number of the step's first example, if the examples of all steps are counted."""
        return sum(map(count_examples, self.earlier_batches))
