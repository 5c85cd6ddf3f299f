"""What measured gradients are held to: the reference, and how far rounding alone may move it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.gradients import Description, describe
from ddp_equivalence.comparison.rounding import Rounding, measure_rounding
from ddp_equivalence.reference import Reference


class Expected:
    """A reference with its gradients' descriptions, and its rounding once somebody asks for it."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    @cached_property
    def described(self) -> dict[GradientKey, Description | None]:
        """Shape, dtype and layout of every measured gradient, if it is as it should be."""
        dtypes = self.reference.dtypes
        return {
            key: description and replace(description, dtype=dtypes[key[1]])
            for key, description in describe(self.reference.expected).items()
        }

    @cached_property
    def rounding(self) -> Rounding:
        """Measured when asked for: gradients within the least limit need not know it."""
        return measure_rounding(self.reference)
