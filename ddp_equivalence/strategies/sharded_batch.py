"""One big batch and its shards, which decide whether a strategy keeps its promise."""

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
from ddp_equivalence.case.training import Steps

MICRO_BATCHES = 3
"""How many micro-batches a full accumulation window has. The number is coprime to every world size
of the catalogue."""

Indices = tuple[int, ...]
"""Positions of examples in the big batch."""


@dataclass(frozen=True)
class ShardedBatch:
    """One big batch of a catalogue case, and the examples that every rank is assigned.

    ``first_shards`` are the shards of the first step. They fix the size of a micro-batch for all
    steps. ``model_coupled`` is the ``batch_coupled`` of the case's model.

    The methods named ``cause_if_...`` each answer for one rule of computing gradients. They return
    None if the rule gives the gradient of the big batch, else the public name of the cause.
    """

    layout: Layout
    shards: Shards
    first_shards: Shards
    batch: Any
    loss: CatalogueLoss
    model_coupled: str | None

    @property
    def batch_coupled(self) -> str | None:
        """The cause's name if model or loss makes an example's gradient depend on the others."""
        return self.model_coupled or self.loss.batch_coupled

    @property
    def shards_by_node(self) -> tuple[Indices, ...]:
        """The examples of every node."""
        return tuple(
            tuple(
                index for rank in self.layout.ranks_on(node) for index in self.shards.indices[rank]
            )
            for node in range(self.layout.nodes)
        )

    @property
    def micro_batches_by_rank(self) -> tuple[tuple[Indices, ...], ...]:
        """The micro-batches of every rank."""
        return tuple(
            micro_batches(indices, len(first))
            for indices, first in zip(self.shards.indices, self.first_shards.indices, strict=True)
        )

    def cause_if_averaged(self, parts: Sequence[Indices], if_uneven: str = "") -> str | None:
        """The cause if gradients of these parts are averaged with equal weights.

        ``if_uneven``: the cause to return where the parts should have unequal weights.
        """
        if len(parts) == 1:
            return None
        if self.batch_coupled:
            return self.batch_coupled
        normalisers = [self.loss.normalisers(take(self.batch, part)) for part in parts]
        terms = list(zip(*normalisers, strict=True))
        if any(term[0].kind == "sum" for term in terms):
            return "mean_not_sum"
        if all(len({part.count for part in term}) == 1 for term in terms):  # on every part
            return None
        if if_uneven:
            return if_uneven
        sizes = [len(part) for part in parts]
        if all(_divides_by_examples(term, sizes) for term in terms):
            return "uneven_shards_weighted_equally"
        return "token_counts_weighted_equally"

    def cause_if_summed(self, parts: Sequence[Indices], sums_constants: bool = True) -> str | None:
        """The cause if gradients of these parts are added up.

        ``sums_constants``: True if terms that do not depend on the data are added up as well.
        """
        if len(parts) == 1:
            return None
        kinds = {term.kind for term in self.loss.normalisers(self.batch)}
        if "mean" in kinds or (sums_constants and "once" in kinds):
            return "sum_not_mean"
        return self.batch_coupled

    def cause_if_outputs_are_gathered(self) -> str | None:
        """The cause if only the forward pass is split, and one loss is given all outputs."""
        return self.model_coupled if self.layout.world_size > 1 else None

    def cause_if_divided_globally(self) -> str | None:
        """The cause if every rank computes its terms alone, and divides them by global counts."""
        return self.batch_coupled if self.layout.world_size > 1 else None


def _divides_by_examples(term: Sequence[Normaliser], sizes: Sequence[int]) -> bool:
    """True if the term divides by the number of each part's examples, up to a constant factor.

    Also True for a term that does not depend on the data: it divides by nothing.
    """
    if term[0].kind == "once":
        return True
    total, examples = sum(part.count for part in term), sum(sizes)
    return all(
        part.count * examples == total * size for part, size in zip(term, sizes, strict=True)
    )


def micro_batches(indices: Indices, full_window: int) -> tuple[Indices, ...]:
    """Cut a rank's examples into micro-batches.

    ``full_window`` examples are cut into ``MICRO_BATCHES`` micro-batches, and fewer examples into
    fewer micro-batches of the same size. A rank without examples has one empty micro-batch, since
    every rank must take part in the all-reduce.
    """
    size = max(1, ceil(full_window / MICRO_BATCHES))
    cut = tuple(indices[start : start + size] for start in range(0, len(indices), size))
    return cut or ((),)


def sharded_batches(case: Case, steps: Steps = 1) -> list[ShardedBatch]:
    """The sharded batch of every step of a catalogue case.

    Raises BadCase for a loss of the user's own.
    """
    loss = catalogue_loss_of(case, needed_by="a promise")
    model_coupled = MODELS[case.model].batch_coupled if isinstance(case.model, str) else None
    batches = build_batches(case, steps)
    shards = [split(case.shards, count_examples(batch), case.ranks.world_size) for batch in batches]
    return [
        ShardedBatch(case.ranks, step_shards, shards[0], batch, loss, model_coupled)
        for step_shards, batch in zip(shards, batches, strict=True)
    ]
