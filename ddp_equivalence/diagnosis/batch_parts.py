"""The parts of the big batch whose gradients the ranks average."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.example_gradients import ExampleGradients
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.strategies.sharded_batch import Indices

PartsByRank = tuple[tuple[Indices, ...], ...]
"""For every rank of the layout, the examples of each of its micro-batches."""


@dataclass(frozen=True)
class BatchParts:
    """Each part is a micro-batch. Every rank of the layout averages the gradients of its parts.

    ``by_rank`` is None where the parts are not known.
    """

    by_rank: PartsByRank | None
    examples: ExampleGradients

    @property
    def count(self) -> int:
        """The number of parts on all ranks; if they are not known, the number of ranks."""
        if self.by_rank is None:
            return self.examples.setting.world_size
        return sum(map(len, self.by_rank))

    @property
    def micro_batches_per_rank(self) -> int | None:
        """The number of micro-batches of each rank; None if it is not the same on all ranks."""
        counts = {len(parts) for parts in self.by_rank or ()}
        return counts.pop() if len(counts) == 1 else None

    @property
    def examples_by_rank(self) -> list[Indices]:
        """For every rank, the examples of all its parts; empty where the parts are not known."""
        return [tuple(index for part in parts for index in part) for parts in self.by_rank or ()]

    def contributions(self) -> Tensor | None:
        """The mean gradient of each rank's parts, shape (world size, elements); None if unknown."""
        if self.by_rank is None:
            return None
        return torch.stack([torch.stack(self._gradients(parts)).mean(0) for parts in self.by_rank])

    def total(self) -> Tensor | None:
        """The sum of the gradients of all parts, shape (elements,); None if they are unknown."""
        if self.by_rank is None:
            return None
        return torch.stack([g for parts in self.by_rank for g in self._gradients(parts)]).sum(0)

    @cached_property
    def add_up_to_the_big_batch(self) -> bool:
        """True if the big batch's gradient is the sum of the parts' gradients.

        False if only one part has a gradient: the big batch may then be their mean just as well.
        """
        total = self.total()
        if total is None:
            return False
        gradients = [g for parts in self.by_rank or () for g in self._gradients(parts)]
        several = sum(bool(gradient.any()) for gradient in gradients) > 1
        return several and nearly_equal(total, self.examples.expected)

    def _gradients(self, parts: tuple[Indices, ...]) -> list[Tensor]:
        return [self.examples.gradient(part) for part in parts]
