"""Tells whether the values of two tensors are equal up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

LEAST_TOLERANCE = 1e-9
ROUNDING = 200.0
"""Values are equal if they differ by at most this many eps of the largest, or by the least."""


def go_further(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """True if a rank has a whole number above all of one rank, as where positions are padded."""
    most = max((float(one.max()) for one in parts if one.numel()), default=0.0)
    return whole.numel() > 0 and most > float(whole.max())


def finite(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same, with a number that no tensor has in the place of infinity, as masks leave it."""
    if all(bool(one.isfinite().all()) for one in tensors):
        return list(tensors)
    finite = [one[one.isfinite()] for one in tensors]
    most = 1 + 2 * max((float(one.abs().max()) for one in finite if one.numel()), default=0.0)
    return [one.nan_to_num(posinf=most, neginf=-most) for one in tensors]


@dataclass(frozen=True)
class Close:
    """Whether two tensors are equal up to rounding."""

    most: float

    @classmethod
    def of(cls, tensors: Sequence[Tensor], eps: float, scale: float) -> Close:
        largest = max((float(one.abs().max()) for one in tensors if one.numel()), default=0.0)
        tolerance = max(LEAST_TOLERANCE, ROUNDING * eps)
        return cls(max(tolerance * largest, ROUNDING * eps * scale))

    def __call__(self, one: Tensor, other: Tensor) -> bool:
        return not one.numel() or float((one - other).abs().max()) <= self.most
