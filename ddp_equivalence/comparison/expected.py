"""What measured gradients are compared with: the reference, and its rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.gradients import Description, describe
from ddp_equivalence.comparison.rounding import Rounding, measure_more, measure_rounding
from ddp_equivalence.reference import Reference


class Expected:
    """A reference, the descriptions of its gradients, and its rounding."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    @cached_property
    def described(self) -> dict[GradientKey, Description | None]:
        """The shape, dtype and layout that every measured gradient should have."""
        dtypes = self.reference.dtypes
        return {
            key: description and replace(description, dtype=dtypes[key[1]])
            for key, description in describe(self.reference.expected).items()
        }

    @cached_property
    def rounding(self) -> Rounding:
        """Measured on first use, because gradients within the least limit pass without it."""
        return measure_rounding(self.reference)

    @cached_property
    def rounding_of_more_runs(self) -> Rounding:
        """Measured where the comparison fails by so little that rounding may be the reason."""
        return measure_more(self.reference, self.rounding)
