"""What the catalogue must know of a loss: its value, what it divides by, and its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp_equivalence.case.models.model import CatalogueModel

Batch = dict[str, Any]
"""``inputs`` for the model and ``targets`` for the loss, examples along dim 0 of every tensor."""

Kind = Literal["mean", "sum", "once"]


@dataclass(frozen=True)
class Normaliser:
    """How one term of a loss grows with the batch.

    ``mean``: a total divided by ``count``, both adding up over examples. ``sum``: a total, divided
    by nothing. ``once``: does not depend on the data, and belongs in the loss once, however many
    ranks there are.
    """

    kind: Kind
    count: float = 1.0


@dataclass(frozen=True)
class CatalogueLoss:
    """One loss of the catalogue.

    ``value(model, batch)`` is the loss as a user writes it, and all that the reference uses.
    ``totals(model, outputs, batch)`` gives the same terms before any division, in the order of
    ``normalisers(batch)``; only strategies that divide by a global count use these two.
    ``targets(generator, inputs, model)`` makes the targets of a batch.
    """

    name: str
    value: Callable[[nn.Module, Batch], Tensor]
    totals: Callable[[nn.Module, Tensor, Batch], tuple[Tensor, ...]]
    normalisers: Callable[[Batch], tuple[Normaliser, ...]]
    targets: Callable[[torch.Generator, Tensor, CatalogueModel], Any]
    output: str = "vector"
    """The kind of model output that it takes."""
    batch_coupled: str | None = None
    """The cause's name, where an example's gradient depends on the other examples. The totals of
    parts do not add up to that of the batch then, and no divisor makes them."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.value(model, batch)
