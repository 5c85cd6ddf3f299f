"""What is known of one step before any rank runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.random_state import step_seed
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.training import Training
from ddp_equivalence.comparison.expected import Expected
from ddp_equivalence.diagnosis.divisor_candidates import distinct_divisors
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.strategies.sharded_batch import Indices


@dataclass(frozen=True)
class Setting:
    """One step of a case: which ranks train which model on which examples.

    ``batch``: the big batch of the step, and ``example_count`` the number of its examples.
    ``earlier_batches`` and ``earlier_examples``: the same of the steps before it. The weights were
    still right after those steps. ``shards``: the examples that each rank was given; None if the
    step takes its examples itself. ``reporting_ranks``: the ranks that send gradients; if a single
    process drives all ranks of the layout, only rank 0 sends any.

    ``dtype``: the least precise dtype of a parameter. ``computed_in``: as in the reference.
    ``seed``: torch is seeded with it before the step. ``scale``: predicted gradients are multiplied
    by it: 1 for gradients, -lr for updates. ``sums_in_nodes``: the strategy adds gradients up in
    each node and averages these sums. ``batch_coupled``: the name of the cause that applies where
    the loss couples the examples of a batch. ``draws_on_cpu``: the ranks draw random numbers on the
    CPU, as predictions do.
    ``divisor_candidates``: name -> number that a mean over the big batch may divide by.
    """

    case: Case
    layout: Layout
    batch: object
    example_count: int
    earlier_batches: tuple[object, ...]
    earlier_examples: tuple[int, ...]
    shards: tuple[Indices, ...] | None
    reporting_ranks: tuple[int, ...]
    training: Training
    dtype: torch.dtype
    computed_in: torch.dtype | None
    seed: int
    has_batch_norm: bool
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
        """The number of the step's first example, counted from 0 over the examples of all steps."""
        return sum(self.earlier_examples)


def setting_of(
    request: Request, expected: Expected, batches: Sequence[object], step: int
) -> Setting:
    """The setting of one step of a check; ``batches`` are the big batches of all steps."""
    case, reference = request.case, expected.reference
    model, batch = build_model(case), batches[step]
    examples = reference.examples[step]
    shards = None
    if case.shards != OWN and not request.read_order:
        shards = split(case.shards, examples, case.ranks.world_size).indices
    return Setting(
        case=case,
        layout=case.ranks,
        batch=batch,
        example_count=examples,
        earlier_batches=tuple(batches[:step]),
        earlier_examples=reference.examples[:step],
        shards=shards,
        reporting_ranks=tuple(range(request.processes.world_size)),
        training=request.training,
        has_batch_norm=_trains_with(model, nn.modules.batchnorm._BatchNorm),
        dtype=reference.lowest_dtype,
        computed_in=reference.computed_in,
        seed=step_seed(case, step),
        batch_coupled=LOSSES[case.loss].batch_coupled if isinstance(case.loss, str) else None,
        sums_in_nodes=request.strategy is not None and request.strategy.sums_in_nodes,
        scale=-request.lr if request.compare == "update" else 1.0,
        draws_on_cpu=request.lane.device_type == "cpu",
        divisor_candidates=distinct_divisors(batch, examples),
    )


def _trains_with(model: nn.Module, kind: type[nn.Module]) -> bool:
    """True if the model has a module of this kind in training mode."""
    return any(isinstance(module, kind) and module.training for module in model.modules())
