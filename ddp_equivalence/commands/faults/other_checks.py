"""Other checks of training, and whether each would have noticed a planted fault."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.report.verdict import Verdict

LOSS_TOLERANCE = 1e-4
"""Relative: a loss that agrees to four digits looks right in a log."""

ADAM_EPS = 1e-8
LEARNING_RATE = 1e-3


def loss_value(verdict: Verdict, view: View) -> bool:
    """True if the mean of the ranks' losses is not the loss of the big batch, to four digits."""
    step = len(view.before)
    by_rank = []
    for observation in verdict.observed.values():
        losses = [backward.loss for backward in observation.backwards if backward.step == step]
        by_rank.append(sum(loss for loss in losses if loss is not None))
    if not by_rank:
        return False
    expected = view.piece(tuple(range(view.examples))).loss
    return abs(sum(by_rank) / len(by_rank) - expected) > LOSS_TOLERANCE * abs(expected)


def adam_update(verdict: Verdict, view: View) -> bool:
    """True if torch.testing.assert_close, with its defaults, fails for rank 0's first Adam step."""
    return not _close(_adam(view.measured[0]), _adam(view.expected), view.dtype)


def rank_agreement(verdict: Verdict, view: View) -> bool:
    """True if the ranks do not hold the same gradients."""
    return verdict.comparison is not None and not verdict.comparison.ranks_agree


def assert_close(verdict: Verdict, view: View) -> bool:
    """True if torch.testing.assert_close, with its defaults, fails for rank 0's gradients."""
    return not _close(view.measured[0], view.expected, view.dtype)


OTHER_CHECKS: dict[str, Callable[[Verdict, View], bool]] = {
    "loss": loss_value,
    "Adam": adam_update,
    "ranks agree": rank_agreement,
    "assert_close": assert_close,
}
"""By the name in the table: functions that return True if the check would have noticed."""


def _adam(gradient: Tensor) -> Tensor:
    """The update of Adam's first step.

    In the first step both moving averages are of one gradient, and bias correction cancels their
    factors. Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1.
    """
    return -LEARNING_RATE * gradient / (gradient.abs() + ADAM_EPS)


def _close(measured: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    try:
        torch.testing.assert_close(measured.to(dtype), expected.to(dtype))
    except AssertionError:
        return False
    return True
