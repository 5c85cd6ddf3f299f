"""Whether a prediction explains the difference of every parameter, also of those with small ones.

Judged on all elements together, a small head would vanish beside a large body.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from torch import Tensor

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.view import View

MOST_LEFT = 0.4
"""The part of a parameter's difference that an explanation may leave."""

MULTIPLE = 4.0
"""It may also leave this many times the parameter's limit."""

LimitByName = Mapping[str, float]
"""Parameter -> the limit of its error, relative to the norm of its gradient."""


def limits_by_name(comparison: Comparison) -> LimitByName:
    """The relative limit of every parameter, the widest of all steps."""
    limits: dict[str, float] = {}
    for parameter in comparison.parameters:
        relative = parameter.limit.absolute / parameter.norm if parameter.norm > 0 else inf
        limits[parameter.key[1]] = max(relative, limits.get(parameter.key[1], 0.0))
    return limits


def explains_every_parameter(view: View, predicted: Tensor, limits: LimitByName) -> bool:
    """True if the prediction leaves little of the difference of each parameter that differs.

    ``predicted``: shape (reporting ranks, elements).
    """
    measured, expected = view.measured.by_rank, view.expected
    for name, place in view.parameters.places.items():
        if name not in view.measured.differing or place.start == place.stop:
            continue
        own, right = measured[:, place], expected[place]
        difference = float((own - right).nan_to_num(0.0).norm())
        left = float((own - predicted[:, place]).nan_to_num(0.0).norm())
        limit = limits.get(name, 0.0) * float(right.norm()) * len(own) ** 0.5
        if left > max(MOST_LEFT * difference, MULTIPLE * limit):
            return False
    return True
