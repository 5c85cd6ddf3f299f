"""An entry of the catalogue of losses: the loss, its terms, and what each term divides by."""

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
    """The number that one term of a loss divides by on one batch, and the kind of the term.

    ``kind`` says how the term is made. A ``mean`` is a total divided by ``count``; total and count
    both add up over examples. A ``sum`` is a total divided by nothing. A term of the kind ``once``
    does not depend on the data, and belongs in the loss once, however many ranks there are.
    """

    kind: Kind
    count: float = 1.0


@dataclass(frozen=True)
class CatalogueLoss:
    """One loss of the catalogue.

    ``value(model, batch)`` is the loss as a user writes it. The reference uses nothing else.
    ``totals(model, outputs, batch)`` gives its terms before any division. ``normalisers(batch)``
    says what each of these terms divides by, in the same order. Strategies that divide by a global
    count use both.
    ``targets(generator, inputs, model)`` makes the targets of a batch.
    """

    name: str
    value: Callable[[nn.Module, Batch], Tensor]
    totals: Callable[[nn.Module, Tensor, Batch], tuple[Tensor, ...]]
    normalisers: Callable[[Batch], tuple[Normaliser, ...]]
    targets: Callable[[torch.Generator, Tensor, CatalogueModel], Any]
    output: str = "vector"
    """The kind of model output that the loss takes."""
    batch_coupled: str | None = None
    """None if an example's gradient does not depend on the other examples in the batch. Otherwise
    the name of the cause by which a split batch differs with this loss: the totals of the parts do
    not add up to the total of the batch, and no divisor corrects them."""
    plain_mean: bool = False
    """The loss is the mean over all examples or elements, and has no other term."""
    uses_all_parameters: bool = False
    """The loss uses every parameter of the model, even one that the forward pass left out."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.value(model, batch)
