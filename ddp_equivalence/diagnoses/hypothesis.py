"""A hypothesis: an explanation with a prediction of what every rank would then hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_equivalence.building import take
from ddp_equivalence.case import Case
from ddp_equivalence.errors import BadCase
from ddp_equivalence.facts import Indices
from ddp_equivalence.layouts import Layout
from ddp_equivalence.reference import gradient_of

NEAR = 1e-6
"""A prediction nearer to the big batch than this is the big batch."""


@dataclass
class View:
    """What a hypothesis may ask about a case. Vectors are all parameters, flattened and joined.

    ``expected``: the big batch, shape (parameters,). ``batch``: its examples. ``before``: the big
    batches of the steps before, after which the weights were still right. ``ranks``: the ranks
    that reported.
    ``parts``: per rank of the layout, the parts of the batch whose gradients it averages; None
    where the step takes its own examples. ``scale``: 1 for gradients, -lr for updates. ``on_cpu``:
    the ranks drew from the generator that predictions draw from.
    """

    case: Case
    layout: Layout
    expected: Tensor
    shapes: dict[str, tuple[int, ...]]
    ranks: tuple[int, ...]
    parts: tuple[tuple[Indices, ...], ...] | None
    batch: object
    before: tuple[object, ...]
    lr: float
    has_batch_norm: bool
    has_dropout: bool
    scale: float = 1.0
    on_cpu: bool = True
    known: dict[Indices, Tensor] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def part_count(self) -> int:
        """How many gradients are put together; one a rank where the parts are not known."""
        return self.world_size if self.parts is None else sum(map(len, self.parts))

    def gradient(self, indices: Indices) -> Tensor:
        """The gradient of these examples alone, shape (parameters,); NaN if it has none."""
        if indices not in self.known:
            self.known[indices] = self.scale * self._compute(indices)
        return self.known[indices]

    def contributions(self) -> Tensor | None:
        """What each rank of the layout brings: shape (world size, parameters)."""
        if self.parts is None:
            return None
        return torch.stack(
            [torch.stack([self.gradient(p) for p in of_rank]).mean(0) for of_rank in self.parts]
        )

    def total(self) -> Tensor | None:
        """The gradients of all parts added up: shape (parameters,)."""
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
        """The same on every rank that reported: shape (ranks, parameters)."""
        return vector.expand(len(self.ranks), -1)

    def _compute(self, indices: Indices) -> Tensor:
        try:
            found = gradient_of(self.case, take(self.batch, indices), self.before, self.lr)
        except BadCase:
            return torch.full_like(self.expected, torch.nan)
        return flatten(found, self.shapes)


def flatten(gradients: dict[str, Tensor | None], shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """The gradients of the named parameters as one float64 vector; None counts as zero."""
    pieces = []
    for name, shape in shapes.items():
        value = gradients.get(name)
        piece = torch.zeros(shape) if value is None else value.to_dense()
        pieces.append(piece.reshape(-1).double())
    return torch.cat(pieces)


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


@dataclass(frozen=True)
class Hypothesis:
    """One explanation.

    ``sentence`` says what happened, ``look_at`` where. ``predict(view)``: what the ranks would
    hold, shape (ranks, parameters), in each of the ways this can come about; none where it cannot
    be the cause. ``plausible(view)``: no prediction is possible, but the case has what it takes;
    believed only where nothing else explains.
    """

    name: str
    sentence: str
    look_at: str
    predict: Callable[[View], Sequence[Tensor]]
    plausible: Callable[[View], bool] = lambda view: False
