"""How much of a measured gradient a prediction leaves unexplained."""

from __future__ import annotations

from torch import Tensor

NEGLIGIBLE = 1e-6
"""Two gradients that differ by less, relative to their norm, are equal up to rounding. This is wide
enough for a model in float64 that computes a part of its gradient in float32."""


def nearly_equal(measured: Tensor, predicted: Tensor) -> bool:
    """True if the two are equal up to rounding."""
    return unexplained(measured, predicted) < NEGLIGIBLE


def unexplained(measured: Tensor, predicted: Tensor) -> float:
    """||measured - predicted|| / ||measured||. Elements that are NaN in both count as explained.

    Returns infinity if an element is NaN in one of them only.
    """
    missing = measured.isnan()
    if bool((missing != predicted.isnan()).any()):
        return float("inf")
    norm = float(measured.nan_to_num(0.0).norm())
    distance = float((measured - predicted).nan_to_num(0.0).norm())
    if norm > 0:
        return distance / norm
    return 0.0 if distance == 0 else float("inf")
