"""How near two gradients are, and of which multiples and mixtures of others one is made."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from ddp_equivalence.measurement.gradient_watch import factor_between

NEGLIGIBLE = 1e-6
"""Two gradients that differ by less, relative to their norm, are equal up to rounding. This is wide
enough for a model in float64 that computes a part of its gradient in float32."""

FITTED = 1e-4
"""A factor or a weight that was fitted to measured gradients is equal to another one if it differs
by less, relative to it: the rounding of the gradients of NEGLIGIBLE is enlarged by a fit."""

WORST_CONDITION = 1e8
"""The condition number beyond which gradients are too alike to be told apart."""


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


def nearest_factor(measured: Tensor, predicted: Tensor) -> float | None:
    """The number k for which k times the prediction is nearest to the measurement.

    None if the prediction is zero, or if an element is not finite.
    """
    square = float((predicted * predicted).sum())
    product = float((measured * predicted).sum())
    return product / square if square > 0 and isfinite(product) else None


def is_multiple(measured: Tensor, predicted: Tensor) -> bool:
    """True if the measurement is some multiple of the prediction, up to rounding."""
    return factor_between(predicted, measured, NEGLIGIBLE) is not None


@dataclass(frozen=True)
class Mixture:
    """``weights``: shape (mixtures, pieces); None if the pieces cannot be told apart.

    ``condition``: the condition number of the fit; infinite with more pieces than elements.
    """

    weights: Tensor | None
    condition: float


def fitted_mixture(
    pieces: Tensor, mixtures: Tensor, worst_condition: float = WORST_CONDITION
) -> Mixture:
    """The weight of each piece in each mixture, by least squares.

    ``pieces``: shape (pieces, elements). ``mixtures``: shape (mixtures, elements).
    """
    is_finite = bool(pieces.isfinite().all()) and bool(mixtures.isfinite().all())
    if pieces.shape[0] > pieces.shape[1] or not is_finite:
        return Mixture(None, float("inf"))
    singular = torch.linalg.svdvals(pieces)
    condition = float(singular[0] / singular[-1]) if singular[-1] > 0 else float("inf")
    if condition > worst_condition:
        return Mixture(None, condition)
    solution: Tensor = torch.linalg.lstsq(pieces.T, mixtures.T).solution
    return Mixture(solution.T, condition)
