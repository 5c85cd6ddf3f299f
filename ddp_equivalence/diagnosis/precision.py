"""Decides whether a check in float64 has to be repeated in the model's own precision."""

from __future__ import annotations

from dataclasses import replace

import torch

from ddp_equivalence.case.build import build_model
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.measurement.request import Request

EPS = torch.finfo(torch.float32).eps

LARGEST, SMALLEST = 64 * EPS, EPS / 1024
"""Rounding in float32 leaves a relative error between these bounds in a check in float64."""


def has_the_size_of_float32(comparison: Comparison | None) -> bool:
    """True if the largest of all errors could have been left by rounding in float32."""
    largest = _largest_error(comparison)
    return largest is not None and SMALLEST <= largest <= LARGEST


def is_at_most_float32(comparison: Comparison | None) -> bool:
    """True if no error is larger than rounding in float32 leaves."""
    largest = _largest_error(comparison)
    return largest is not None and largest <= LARGEST


def _largest_error(comparison: Comparison | None) -> float | None:
    """The largest error of all parameters; None if the ranks disagree, or a gradient is missing."""
    if comparison is None or comparison.structure or not comparison.ranks_agree:
        return None
    parameters = [one for one in comparison.parameters if not one.limit.only_rounding]
    return max((one.error for one in parameters if one.norm > 0), default=0.0)


def in_float64(request: Request) -> Request | None:
    """The same request in float64; None if it is not of a user's own step."""
    if request.strategy is not None or request.plant or request.case.exact:
        return None
    return replace(request, case=replace(request.case, dtype=torch.float64))


def in_own_precision(request: Request) -> Request | None:
    """The same request in the precision in which the user's function builds the model.

    None if the function itself builds the model in float64.
    """
    case = replace(request.case, dtype=None)
    trained = [one for one in build_model(case).parameters() if one.requires_grad]
    if all(parameter.dtype is torch.float64 for parameter in trained):
        return None
    return replace(request, case=case)
