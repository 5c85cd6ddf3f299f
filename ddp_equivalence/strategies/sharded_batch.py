"""What a strategy's promise may depend on: who holds what, and what the loss divides by there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.case.build import build_batches, catalogue_loss_of
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.case.losses.loss import CatalogueLoss, Normaliser
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.shards import Shards, split
from ddp_equivalence.case.steps import Steps

MICRO_BATCHES = 3
"""Accumulation steps of a full window; coprime to every world size."""

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """One big batch of a catalogue case, dealt to ranks.

    ``first_shards`` is the deal of the first step, which fixes the size of a micro-batch.
    """

    layout: Layout
    shards: Shards
    first_shards: Shards
    batch: Any
    loss: CatalogueLoss
    model_coupled: str | None

    @property
    def batch_coupled(self) -> str | None:
        """The cause's name, if model or loss make an example's gradient depend on the others."""
        return self.model_coupled or self.loss.batch_coupled

    @property
    def node_shards(self) -> tuple[Indices, ...]:
        """The examples of every node."""
        return tuple(
            tuple(i for rank in self.layout.ranks_on(node) for i in self.shards.indices[rank])
            for node in range(self.layout.nodes)
        )

    @property
    def micro_shards(self) -> tuple[tuple[Indices, ...], ...]:
        """The micro-batches of every rank."""
        return tuple(
            micro_batches(indices, len(first))
            for indices, first in zip(self.shards.indices, self.first_shards.indices, strict=True)
        )

    def mean_over(self, parts: Sequence[Indices], uneven: str = "") -> str | None:
        """What is wrong if the gradients of these parts are averaged with equal weights.

        The cause's name (``uneven`` if given, where the parts count unequally), or None if that
        is the big batch.
        """
        if len(parts) == 1:
            return None
        if self.batch_coupled:
            return self.batch_coupled
        normalisers = [self.loss.normalisers(take(self.batch, part)) for part in parts]
        terms = list(zip(*normalisers, strict=True))
        if any(of_term[0].kind == "sum" for of_term in terms):
            return "mean_not_sum"
        if all(len({one.count for one in of_term}) == 1 for of_term in terms):
            return None
        sizes = [len(part) for part in parts]
        by_examples = all(_proportional(of_term, sizes) for of_term in terms)
        named = "uneven_shards" if by_examples else "token_counts"
        return uneven or f"{named}_weighted_equally"

    def sum_over(self, parts: Sequence[Indices], once: bool = True) -> str | None:
        """What is wrong if the gradients of these parts are added up.

        ``once``: terms that do not depend on the data are added up as well.
        """
        if len(parts) == 1:
            return None
        kinds = {term.kind for term in self.loss.normalisers(self.batch)}
        if "mean" in kinds or (once and "once" in kinds):
            return "sum_not_mean"
        return self.batch_coupled

    def apart(self) -> str | None:
        """What is wrong if only the forward pass is split, and the loss sees all outputs."""
        return self.model_coupled if self.layout.world_size > 1 else None

    def locally(self) -> str | None:
        """What is wrong if each rank's terms come from its own examples, however divided."""
        return self.batch_coupled if self.layout.world_size > 1 else None


def _proportional(term: Sequence[Normaliser], sizes: Sequence[int]) -> bool:
    """True if the term divides by the examples of each part, but for a constant factor."""
    total, examples = sum(one.count for one in term), sum(sizes)
    pairs = zip(term, sizes, strict=True)
    return term[0].kind == "once" or all(one.count * examples == total * n for one, n in pairs)


def micro_batches(indices: Indices, full_window: int) -> tuple[Indices, ...]:
    """Cut a rank's examples into micro-batches of the size that a full window has.

    A window with fewer examples than ``full_window`` has fewer micro-batches; one without any
    example has one empty micro-batch, since every rank takes part in the all-reduce.
    """
    size = max(1, ceil(full_window / MICRO_BATCHES))
    cut = tuple(indices[start : start + size] for start in range(0, len(indices), size))
    return cut or ((),)


def facts_of(case: Case, steps: Steps = 1) -> list[Facts]:
    """The facts of every step of a catalogue case. Raises BadCase for a loss of the user's own."""
    loss = catalogue_loss_of(case, needed_by="a promise")
    coupled = MODELS[case.model].batch_coupled if isinstance(case.model, str) else None
    batches = build_batches(case, steps)
    deals = [split(case.shards, count_examples(b), case.ranks.world_size) for b in batches]
    return [
        Facts(case.ranks, deal, deals[0], batch, loss, coupled)
        for deal, batch in zip(deals, batches, strict=True)
    ]
