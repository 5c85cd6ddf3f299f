"""What a hypothesis may ask about a case: gradients of any examples, what was measured and seen."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.diagnosis.example_gradients import loss_and_gradient_of
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.ranks.threads import threads_for
from ddp_equivalence.strategies.sharded_batch import Indices

NEAR = 1e-6
"""A prediction nearer to the big batch than this is the big batch."""

WORST_CONDITION = 1e8
"""Beyond this condition number pieces cannot be told apart."""


MicroBatches = tuple[tuple[Tensor, ...], ...]
"""Per rank, the gradient of each of its micro-batches, shape (elements,)."""


@dataclass(frozen=True)
class Piece:
    """The loss of some examples, and the ``vector`` of its gradient."""

    loss: float
    vector: Tensor


@dataclass
class View:
    """Vectors are the parameters, flattened and joined: all elements, or the same selection.

    ``expected``: the big batch, shape (elements,). ``shapes``: of the parameters, by name.
    ``batch``: its examples. ``before``: the big batches of the steps before, after which the
    weights were still right; ``previous`` their gradients. ``ranks``: the ranks that reported.
    ``dealt``: the examples of every rank; None where the step takes its own. ``parts``: per rank of
    the layout, the parts of the batch whose gradients it averages; None if unknown. ``scale``: 1
    for gradients, -lr for updates. ``on_cpu``: the ranks drew from the generator that predictions
    draw from.

    ``dtype``: the lowest of a parameter. ``seed``: what torch is seeded with before the step.
    ``sums_in_nodes``: the strategy adds up inside nodes, and averages over them. ``counts``: what a
    mean over the big batch may divide by: "examples", "elements of targets" ...

    Of a difference: ``measured``, shape (ranks, elements), ``differing``, the parameters beyond
    their limits, ``observed``, what a closer look at each rank saw (empty without one), and
    ``unrepeatable``, whether it saw other gradients than the first.
    """

    case: Case
    layout: Layout
    expected: Tensor
    shapes: dict[str, tuple[int, ...]]
    selection: ElementSample[str]
    ranks: tuple[int, ...]
    dealt: tuple[Indices, ...] | None
    parts: tuple[tuple[Indices, ...], ...] | None
    batch: object
    examples: int
    before: tuple[object, ...]
    previous: tuple[Tensor, ...]
    lr: float
    has_batch_norm: bool
    has_dropout: bool
    dtype: torch.dtype
    seed: int
    counts: Mapping[str, float] = field(default_factory=dict)
    batch_coupled: str | None = None
    sums_in_nodes: bool = False
    scale: float = 1.0
    on_cpu: bool = True
    known: dict[tuple[Indices, bytes], Piece] = field(default_factory=dict)
    measured: Tensor = field(default_factory=lambda: torch.empty(0))
    differing: frozenset[str] = frozenset()
    observed: Mapping[int, Observation] = field(default_factory=dict)
    unrepeatable: bool = False

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def part_count(self) -> int:
        """How many gradients are put together; one a rank where the parts are not known."""
        return self.world_size if self.parts is None else sum(map(len, self.parts))

    @property
    def micro_batches(self) -> int | None:
        """Of every rank, if all have equally many; else None."""
        counts = {len(of_rank) for of_rank in self.parts or ()}
        return counts.pop() if len(counts) == 1 else None

    def piece(self, indices: Indices, generator: bytes = b"") -> Piece:
        """These examples alone; NaN if they have no loss. ``generator``: torch's own, before."""
        key = indices, generator
        if key not in self.known:
            self.known[key] = self._compute(indices, generator)
        return self.known[key]

    def gradient(self, indices: Indices) -> Tensor:
        """The gradient of these examples alone, shape (elements,); NaN if it has none."""
        return self.piece(indices).vector

    def contributions(self, parts: Sequence[Sequence[Indices]] | None = None) -> Tensor | None:
        """What each rank of the layout brings: shape (world size, elements)."""
        parts = self.parts if parts is None else parts
        if parts is None:
            return None
        return torch.stack(
            [torch.stack([self.gradient(p) for p in of_rank]).mean(0) for of_rank in parts]
        )

    @cached_property
    def micro(self) -> tuple[MicroBatches, ...]:
        """Per rank, what each of its micro-batches adds to its own gradient, before any reduction.

        In the ways that this may be: as it was seen; each part over the number of parts; and, where
        it is known at which loss every backward began, each part as often as that loss was its own.
        """
        ways = [] if self.seen is None else [self.seen]
        if self.parts is not None:
            ways.append(
                tuple(
                    tuple(self.gradient(part) / len(of_rank) for part in of_rank)
                    for of_rank in self.parts
                )
            )
        factors = self.loss_factors
        if self.read is not None and factors is not None:
            ways.append(
                tuple(
                    tuple(
                        factor * self.gradient(part)
                        for factor, part in zip(of_factors, of_rank, strict=True)
                    )
                    for of_factors, of_rank in zip(factors, self.read, strict=True)
                )
            )
        return tuple(ways)

    @cached_property
    def seen(self) -> MicroBatches | None:
        """Per rank, what each backward was seen to give it; None unless known of every rank."""
        if sorted(self.observed) != list(range(self.world_size)):
            return None
        found = []
        for rank in range(self.world_size):
            of_rank = tuple(
                self.scale * one.gradient
                for one in self.observed[rank].backwards
                if one.step == len(self.before) and one.gradient is not None
            )
            if not of_rank:
                of_rank = (torch.zeros_like(self.expected),)
            if any(len(one) != len(self.expected) for one in of_rank):
                return None
            found.append(of_rank)
        return tuple(found)

    @cached_property
    def owns(self) -> tuple[Tensor, ...]:
        """Every rank's own gradient before any reduction, shape (world size, elements).

        In the ways that ``micro`` knows.
        """
        found: list[Tensor] = []
        for way in self.micro:
            own = torch.stack([torch.stack(of_rank).sum(0) for of_rank in way])
            if bool(own.isfinite().all()) and not any(near(own, other) for other in found):
                found.append(own)
        return tuple(found)

    def put_together(self) -> list[Tensor]:
        """What the ranks' own gradients give, put together as a strategy does that sums in nodes.

        Where all ranks are averaged or summed, the gradients of the parts predict it.
        """
        if not self.sums_in_nodes or self.layout.nodes == self.world_size:
            return []
        return [own.sum(0) / self.layout.nodes for own in self.owns]

    @cached_property
    def loss_factors(self) -> tuple[tuple[float, ...], ...] | None:
        """Of every backward on every rank: the loss it began at over that of what it read."""
        if self.read is None:
            return None
        found = []
        for rank, micro_batches in enumerate(self.read):
            values = [
                one.loss for one in self.observed[rank].backwards if one.step == len(self.before)
            ]
            if len(values) != len(micro_batches):
                return None
            losses = [self.piece(examples).loss for examples in micro_batches]
            if not all(losses) or any(value is None for value in values):
                return None
            found.append(
                tuple(v / own for v, own in zip(values, losses, strict=True) if v is not None)
            )
        return tuple(found)

    def total(self) -> Tensor | None:
        """The gradients of all parts added up: shape (elements,)."""
        if self.parts is None:
            return None
        return torch.stack([self.gradient(p) for of_rank in self.parts for p in of_rank]).sum(0)

    def is_sum(self) -> bool:
        """True if the gradients of the parts add up to the big batch.

        Of parts all but one of which are empty the sum and the whole are one thing: False.
        """
        if self.parts is None:
            return False
        telling = [p for of_rank in self.parts for p in of_rank if self.gradient(p).any()]
        total = self.total()
        return len(telling) > 1 and total is not None and near(total, self.expected)

    def constant(self) -> Tensor | None:
        """The gradient of the terms that do not depend on the data; None if there are none."""
        found = self.gradient(())
        return found if bool(found.isfinite().all()) and bool(found.any()) else None

    def everywhere(self, vector: Tensor) -> Tensor:
        """The same on every rank that reported: shape (ranks, elements)."""
        return vector.expand(len(self.ranks), -1)

    def of_the_ranks(self, rows: Tensor) -> Tensor:
        """Of one row for every rank of the layout, those of the ranks that reported."""
        return rows[list(self.ranks)]

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each parameter's elements are in a vector."""
        found, begin = {}, 0
        for name in self.shapes:
            size = self.selection.size(name)
            found[name] = slice(begin, begin + size)
            begin += size
        return found

    def mix(self, inside: Tensor, outside: Tensor, names: frozenset[str]) -> Tensor:
        """``inside`` for the parameters of these names, ``outside`` for all others."""
        found = outside.clone()
        for name in names & self.places.keys():
            found[..., self.places[name]] = inside[..., self.places[name]]
        return found

    @cached_property
    def ranks_differ(self) -> bool:
        """True if the ranks hold different things, beyond rounding."""
        return not near(self.measured, self.measured.mean(0).expand_as(self.measured))

    @cached_property
    def only_some_differ(self) -> bool:
        return 0 < len(self.differing) < len(self.shapes)

    @cached_property
    def read(self) -> tuple[tuple[Indices, ...], ...] | None:
        """The micro-batches that each rank really read; None unless known of every rank."""
        if sorted(self.observed) != list(range(self.world_size)):
            return None
        step, begin = len(self.before), sum(map(count_examples, self.before))
        known = []
        for rank in range(self.world_size):
            found = self.observed[rank].examples_read(step)
            if found is None:
                return None
            known.append(tuple(tuple(i - begin for i in part) for part in found))
        everything = [i for of_rank in known for part in of_rank for i in part]
        return tuple(known) if all(0 <= i < self.examples for i in everything) else None

    @cached_property
    def times_read(self) -> Counter[int]:
        """Example -> how often it was read on all ranks together."""
        return Counter(i for of_rank in self.read or () for part in of_rank for i in part)

    @cached_property
    def weights(self) -> Tensor | None:
        """How much of each rank's own gradient is in what each rank holds, as ``weights_of``."""
        return self.weights_of(self.owns[0]) if self.owns else None

    def weights_of(self, found: Tensor) -> Tensor | None:
        """How much of each of these gradients is in what each rank holds, by least squares.

        Shape (ranks, gradients); None where they cannot be told apart.
        """
        if not bool(found.isfinite().all()):
            return None
        if found.shape[0] > found.shape[1] or not bool(self.measured.isfinite().all()):
            return None
        values = torch.linalg.svdvals(found)
        if float(values[-1]) * WORST_CONDITION < float(values[0]):
            return None
        solution: Tensor = torch.linalg.lstsq(found.T, self.measured.T).solution
        return solution.T

    @cached_property
    def factor(self) -> float | None:
        """The k for which every rank holds k times the big batch most nearly."""
        size = float(self.expected @ self.expected)
        if not size or not bool(self.measured.isfinite().all()):
            return None
        return float((self.measured @ self.expected).mean()) / size

    def _compute(self, indices: Indices, generator: bytes) -> Piece:
        with warnings.catch_warnings(), threads_for(sum(self.selection.sizes.values())):
            warnings.simplefilter("ignore")  # a single example may be too few for the loss
            return self._computed(indices, generator)

    def _computed(self, indices: Indices, generator: bytes) -> Piece:
        try:
            loss, found = loss_and_gradient_of(
                self.case, take(self.batch, indices), self.before, self.lr, generator
            )
        except BadCase:
            nothing = torch.full_like(self.expected, torch.nan)
            return Piece(float("nan"), nothing)
        known = {name: one for name, one in found.items() if name in self.selection.sizes}
        return Piece(loss, self.scale * self.selection.of(known))


def near(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding, of a float32 part in a float64 model too."""
    return unexplained(one, other) < NEAR


def unexplained(measured: Tensor, predicted: Tensor) -> float:
    """||measured - predicted|| / ||measured||; NaN is explained by NaN in the same place."""
    missing = measured.isnan()
    if bool((missing != predicted.isnan()).any()):
        return float("inf")
    rest = (measured - predicted).nan_to_num(0.0)
    size = float(measured.nan_to_num(0.0).norm())
    distance = float(rest.norm())
    return distance / size if size > 0 else (0.0 if distance == 0 else float("inf"))
