"""Asks whether the loss of a batch is made of the losses of its parts, as a mean or a sum is.

Nothing here depends on what the ranks did: only the loss of the case is asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import exp

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis.example_gradients import LossAndGradient
from ddp_equivalence.diagnosis.loss_and_gradient import gradient_of_outputs
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.strategies.sharded_batch import Indices

Function = Callable[[float], float]

TRANSFORMS: tuple[tuple[str, Function, Function], ...] = (
    ("the square of the loss", lambda loss: loss**2, lambda loss: 2 * loss),
    ("the exponential of the loss", exp, exp),
)
"""What may be a mean where the loss is none: the function of the loss, and its derivative."""

LARGEST_EXPONENT = 100.0

FEWEST_EXAMPLES = 4

FEW_OUTPUTS = 0.25
"""A statistic of order, such as a median, depends on at most this part of the outputs."""


def why_not_additive(view: View) -> str:
    """What shows that the loss is another statistic of the batch than a mean, as a clause; "" if
    nothing does.
    """
    count = view.setting.example_count
    if count < FEWEST_EXAMPLES or view.setting.earlier_batches:
        return ""
    halves = tuple(range(0, count, 2)), tuple(range(1, count, 2))
    return _function_of_a_mean(view, halves) or _statistic_of_order(view, halves)


def _function_of_a_mean(view: View, halves: tuple[Indices, Indices]) -> str:
    """Finds the function of the loss that is a mean over examples, if the loss itself is none."""
    whole = view.examples.compute(tuple(range(view.setting.example_count)))
    parts = [view.examples.compute(half) for half in halves]
    losses = [abs(one.loss) for one in (whole, *parts)]
    if not all(loss < LARGEST_EXPONENT for loss in losses):  # also if one of them is NaN
        return ""
    if _is_weighted_mean(whole, parts):
        return ""
    for name, function, derivative in TRANSFORMS:
        transformed = [
            LossAndGradient(function(one.loss), derivative(one.loss) * one.gradient)
            for one in (whole, *parts)
        ]
        if _is_weighted_mean(transformed[0], transformed[1:]):
            return f"{name} is a mean over examples, and the loss itself is not"
    return ""


def _is_weighted_mean(whole: LossAndGradient, parts: list[LossAndGradient]) -> bool:
    """True if one weight gives both the loss and the gradient of the whole from the two parts."""
    one, other = parts
    difference = one.loss - other.loss
    if abs(difference) < 1e-9 * max(abs(one.loss), abs(other.loss)):
        return nearly_equal(whole.gradient, (one.gradient + other.gradient) / 2)
    weight = (whole.loss - other.loss) / difference
    if not 0 < weight < 1:
        return False
    return nearly_equal(whole.gradient, weight * one.gradient + (1 - weight) * other.gradient)


def _statistic_of_order(view: View, halves: tuple[Indices, Indices]) -> str:
    """Finds a loss with a gradient for few outputs, and for others in a half of the batch."""
    whole = _outputs(view, tuple(range(view.setting.example_count)))
    parts = [_outputs(view, half) for half in halves]
    if whole is None or None in parts:
        return ""
    outputs, gradient = whole
    used = gradient != 0
    if not 0 < int(used.sum()) <= FEW_OUTPUTS * used.numel():
        return ""
    lost = False
    for half, part in zip(halves, parts, strict=True):
        assert part is not None
        rows = list(half)
        if part[0].shape != outputs[rows].shape or not nearly_equal(outputs[rows], part[0]):
            return ""  # the model, or random numbers, make the outputs depend on the batch
        lost |= bool(((part[1] != 0) & ~used[rows]).any())
    if not lost:
        return ""
    return (
        f"the loss depends on {int(used.sum())} of {used.numel()} outputs only, and on others for "
        "a part of the batch"
    )


def _outputs(view: View, examples: Indices) -> tuple[Tensor, Tensor] | None:
    """The outputs of the model for these examples, and the gradient of their loss by output."""
    setting = view.setting
    with view.time.gradient(len(examples)), warnings.catch_warnings(), without_planted_faults():
        warnings.simplefilter("ignore")
        try:
            batch = take(setting.batch, examples, setting.case.batch_dims)
            found = gradient_of_outputs(setting.case, batch, setting.computed_in)
        except BadCase:
            return None
    if found is None or found[0].ndim == 0 or len(found[0]) != len(examples):
        return None
    return found if bool(torch.isfinite(found[1]).all()) else None
