"""What measured gradients are compared with: the reference, and its rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.gradients import Description, describe
from ddp_equivalence.comparison.rounding import Rounding, measure_more, measure_rounding
from ddp_equivalence.reference import Reference


class Expected:
    """A reference, the descriptions of its gradients, and its rounding."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._rounding: dict[torch.dtype | None, Rounding] = {}
        self._of_more_runs: dict[torch.dtype | None, Rounding] = {}

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
            self._rounding[autocast] = measure_rounding(self.reference, autocast)
        return self._rounding[autocast]

    def rounding_of_more_runs(self, autocast: torch.dtype | None = None) -> Rounding:
        """Measured where the comparison fails by so little that rounding may be the reason."""
        if autocast not in self._of_more_runs:
            rounding = self.rounding_under(autocast)
            self._of_more_runs[autocast] = measure_more(self.reference, rounding, autocast)
        return self._of_more_runs[autocast]
