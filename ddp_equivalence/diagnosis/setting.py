"""What is known of one step before any rank runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch_tree import leaves_of, name_of_leaf
from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.losses.token_mean import PADDING
from ddp_equivalence.case.random_state import step_seed
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.training import Training
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.measurement.calls import Call, CodeLine, CollectiveCall, Contents, Kind
from ddp_equivalence.measurement.observation import Observation
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
    ``divisor_candidates``: name -> number that a mean over the big batch may divide by. ``tied``:
    the weights that the model has in several places. ``vectors``: those of one dimension.
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
    tied: tuple[str, ...] = ()
    vectors: frozenset[str] = frozenset()

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
        training=replace(request.training, reference=None),
        has_batch_norm=_trains_with(model, nn.modules.batchnorm._BatchNorm),
        dtype=reference.lowest_dtype,
        computed_in=reference.computed_in,
        seed=step_seed(case, step),
        batch_coupled=LOSSES[case.loss].batch_coupled if isinstance(case.loss, str) else None,
        sums_in_nodes=request.strategy is not None and request.strategy.sums_in_nodes,
        scale=-request.lr if request.compare == "update" else 1.0,
        draws_on_cpu=request.lane.device_type == "cpu",
        divisor_candidates=distinct_divisors(batch, examples),
        tied=_tied(model),
        vectors=frozenset(name for name, one in model.named_parameters() if one.ndim == 1),
    )


def _trains_with(model: nn.Module, kind: type[nn.Module]) -> bool:
    """True if the model has a module of this kind in training mode."""
    return any(isinstance(module, kind) and module.training for module in model.modules())


def _tied(model: nn.Module) -> tuple[str, ...]:
    """The parameters that the model has in several places, by their first names."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    return tuple(of_one[0] for of_one in names.values() if len(of_one) > 1)


Test = Callable[[Call], bool]

REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})
"""Collectives that add up what the ranks give."""


@dataclass
class CallSite:
    """A line, and all calls of one kind that it made. ``by_rank``: rank -> the calls, in order."""

    line: CodeLine
    kind: Kind
    by_rank: dict[int, list[Call]] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that came here."""
        return tuple(sorted(self.by_rank))

    @property
    def first(self) -> Call:
        """The first call of the lowest rank."""
        return self.by_rank[self.ranks[0]][0]

    @property
    def calls(self) -> list[Call]:
        """The calls of the lowest rank that came here."""
        return self.by_rank[self.ranks[0]]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks of its collectives, on all ranks, each once."""
        found = {
            call.collective.ranks
            for calls in self.by_rank.values()
            for call in calls
            if call.collective is not None
        }
        return tuple(sorted(found))

    @property
    def op(self) -> str:
        """The collective that its first call issued; "" if it issued none."""
        return "" if self.first.collective is None else self.first.collective.op

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that its calls were about, on the lowest rank, in order and each once."""
        found: dict[str, None] = {}
        for call in self.calls:
            about = call.collective or call.change or call
            found |= dict.fromkeys(about.names)
        return tuple(found)

    def pointed(self, note: str = "", is_fault: bool = False, missing: str = "") -> PointedLine:
        """The line, to be shown in a report."""
        return PointedLine(self.line, note, is_fault, missing)


@dataclass(frozen=True)
class StepCalls:
    """``by_rank``: rank -> its calls in one step, in their order; empty if none was recorded."""

    by_rank: Mapping[int, tuple[Call, ...]]

    def of(self, rank: int) -> tuple[Call, ...]:
        """The calls of one rank."""
        return self.by_rank.get(rank, ())

    @property
    def of_lowest_rank(self) -> tuple[Call, ...]:
        """The calls of the lowest rank that was observed."""
        return self.of(min(self.by_rank, default=0))

    def places(self, *kinds: Kind, where: Test = lambda call: True) -> list[CallSite]:
        """The lines that made calls of these kinds for which ``where`` is true.

        They are in the order in which the lowest rank came to them first. A call without a known
        line is left out.
        """
        places: dict[tuple[CodeLine, Kind], CallSite] = {}
        for rank in sorted(self.by_rank):
            for call in self.by_rank[rank]:
                line = call.at
                if line is None or call.kind not in kinds or not where(call):
                    continue
                place = places.setdefault((line, call.kind), CallSite(line, call.kind))
                place.by_rank.setdefault(rank, []).append(call)
        return list(places.values())

    def collectives(self, where: Callable[[Call, CollectiveCall], bool]) -> list[CallSite]:
        """The lines that issued collectives of this kind."""
        return self.places(
            Kind.COLLECTIVE,
            where=lambda call: call.collective is not None and where(call, call.collective),
        )

    @cached_property
    def reductions(self) -> list[CallSite]:
        """The lines that reduce gradients or copies of them among ranks."""
        return self.places(Kind.COLLECTIVE, where=reduces_gradients)

    @cached_property
    def backwards(self) -> list[CallSite]:
        """The lines that call backward."""
        return self.places(Kind.BACKWARD)

    def changes(self, where: Test = lambda call: True) -> list[CallSite]:
        """The lines that change ``.grad``, other than by backward or a collective."""
        return self.places(Kind.CHANGE, where=where)

    def multiplied_by(self, factor: float) -> list[CallSite]:
        """The lines that multiply gradients by this number."""

        def is_it(call: Call) -> bool:
            return call.factor is not None and abs(call.factor - factor) <= 1e-5 * abs(factor)

        return self.changes(is_it)


def calls_of_all_steps(observed: Mapping[int, Observation]) -> StepCalls:
    """The calls of the ranks in this step and all others."""
    return StepCalls({rank: seen.calls for rank, seen in observed.items()})


def reduces_gradients(call: Call) -> bool:
    """True for a collective that reduces gradients, or copies of them."""
    collective = call.collective
    return (
        collective is not None
        and collective.op in REDUCING
        and collective.contents in (Contents.GRADIENTS, Contents.COPIES_OF_GRADIENTS)
    )


@dataclass(frozen=True)
class Reading:
    """The ``reader`` reads something by this name, which was ``passed`` to its function, or is set
    in it.
    """

    name: str
    reader: CodeLine
    passed: bool = False


@dataclass(frozen=True)
class PointedLine:
    """``note``: what the line did, as a clause of the report; "" if the line speaks for itself.

    ``is_fault``: the line to change, or, if something is ``missing``, the line after which it
    should stand. ``missing``: what should stand there. ``begins_backward``: a backward pass begins
    there, and nothing else is known of the line. ``of_rows``: it makes the loss of a rank's rows,
    and nothing else is known of it. ``reads``: how another line reads what this one makes.
    """

    line: CodeLine
    note: str = ""
    is_fault: bool = False
    missing: str = ""
    begins_backward: bool = False
    of_rows: bool = False
    reads: Reading | None = None


def all_divisors(batch: Any, examples: int) -> Mapping[str, float]:
    """Every count of this batch, by what is counted: "examples", "elements of targets", ..."""
    divisors: dict[str, float] = {"examples": examples}
    for path, leaf in leaves_of(batch):
        if not isinstance(leaf, Tensor) or leaf.is_complex():
            continue
        leaf = leaf.detach().to_dense()
        name = name_of_leaf(path)
        divisors[f"elements of {name}"] = leaf.numel()
        if bool(((leaf == 0) | (leaf == 1)).all()):
            unit, is_counted = f"elements of {name} that are set", leaf != 0
        elif not leaf.is_floating_point():
            unit, is_counted = f"elements of {name} that are not {PADDING}", leaf != PADDING
        else:
            continue
        divisors[unit] = int(is_counted.sum())
        if is_counted.ndim > 1:
            # A loss on the next token predicts every token of a row except the first.
            divisors[f"{unit}, without the first of each row"] = int(is_counted[:, 1:].sum())
    return divisors


def distinct_divisors(batch: Any, examples: int) -> Mapping[str, float]:
    """The counts that are not zero, each number once."""
    units: dict[float, str] = {}
    for unit, count in all_divisors(batch, examples).items():
        units.setdefault(count, unit)
    return {unit: count for count, unit in units.items() if count}
