"""What measured gradients are compared with: the reference, and its rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import batches_of_steps, build_whole_batch
from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.batch_digest import DataByRank, differing_leaf
from ddp_equivalence.comparison.gradients import Description, describe
from ddp_equivalence.comparison.rounding import Rounding, measure_more, measure_rounding
from ddp_equivalence.reference import Reference


class Expected:
    """A reference, the descriptions of its gradients, and its rounding.

    ``order``: that in which the steps read the examples, if it is not that of the batch. ``data``:
    for every rank, digests of the examples that it must be given; None for a batch of the
    catalogue, which no process can build differently.
    """

    def __init__(
        self,
        reference: Reference,
        data: DataByRank | None = None,
        order: tuple[int, ...] = (),
    ) -> None:
        self.reference = reference
        self.data = data
        self._order = order
        self._rounding: dict[torch.dtype | None, Rounding] = {}
        self._of_more_runs: dict[torch.dtype | None, Rounding] = {}

    def batches(self) -> list[Any]:
        """The big batches, built once more.

        Raises BadCase if they are others than those of the reference.
        """
        case, steps = self.reference.case, self.reference.steps
        whole, sizes = build_whole_batch(case, steps)
        if self.data is not None:
            again = self.data.of_batch(case, whole, sizes)
            leaf = next(filter(None, map(differing_leaf, self.data.by_rank, again.by_rank)), None)
            if leaf is not None:
                right = f"a function that makes the same batch at each call; {leaf} was another "
                right += "one at the second call (an iterator that goes on, or random numbers of "
                right += "a generator that no seed is set in)"
                raise BadCase("batch", name_of(case.batch), right)
        if self._order:
            whole = take(whole, self._order, case.batch_dims)
        return batches_of_steps(case, whole, sizes)

    @cached_property
    def described(self) -> dict[GradientKey, Description | None]:
        """The shape, dtype and layout that every measured gradient should have."""
        dtypes = self.reference.dtypes
        return {
            key: description and replace(description, dtype=dtypes[key[1]])
            for key, description in describe(self.reference.expected).items()
        }

    @property
    def rounding(self) -> Rounding:
        """The rounding without autocast."""
        return self.rounding_under(None)

    def rounding_under(self, autocast: torch.dtype | None) -> Rounding:
        """Measured on first use, because gradients within the least limit pass without it.

        ``autocast``: the dtype of the autocast region in which the forward pass runs, if any.
        """
        if autocast not in self._rounding:
            self._rounding[autocast] = measure_rounding(self.reference, self.batches(), autocast)
        return self._rounding[autocast]

    def rounding_of_more_runs(self, autocast: torch.dtype | None = None) -> Rounding:
        """Measured where the comparison fails by so little that rounding may be the reason."""
        if autocast not in self._of_more_runs:
            rounding = self.rounding_under(autocast)
            self._of_more_runs[autocast] = measure_more(
                self.reference, rounding, self.batches(), autocast
            )
        return self._of_more_runs[autocast]
