"""Other checks that people make: would they have noticed a fault?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.report.verdict import Verdict

DIGITS = 1e-4
"""A loss that agrees to four digits looks right in a log."""

ADAM_EPS = 1e-8
LEARNING_RATE = 1e-3


def loss_value(verdict: Verdict, view: View) -> bool:
    """True if the mean of the ranks' losses is not the loss of the big batch, to four digits."""
    by_rank = []
    for seen in verdict.observed.values():
        values = [call.loss for call in seen.backwards if call.step == view.setting.step]
        by_rank.append(sum(value for value in values if value is not None))
    if not by_rank:
        return False
    whole = view.examples.big_batch_loss
    return abs(sum(by_rank) / len(by_rank) - whole) > DIGITS * abs(whole)


def adam_update(verdict: Verdict, view: View) -> bool:
    """True if Adam's first step on rank 0 is not the big batch's, by the default limits of
    ``torch.testing.assert_close``.
    """
    return not _close(_adam(view.measured.by_rank[0]), _adam(view.expected), view.setting.dtype)


def rank_agreement(verdict: Verdict, view: View) -> bool:
    """True if the ranks do not hold the same values."""
    return verdict.comparison is not None and not verdict.comparison.ranks_agree


def assert_close(verdict: Verdict, view: View) -> bool:
    """True if rank 0's gradients are not the big batch's, by the default limits of
    ``torch.testing.assert_close``.
    """
    return not _close(view.measured.by_rank[0], view.expected, view.setting.dtype)


OTHER_CHECKS: dict[str, Callable[[Verdict, View], bool]] = {
    "loss": loss_value,
    "Adam": adam_update,
    "ranks agree": rank_agreement,
    "assert_close": assert_close,
}
"""By the name in the table, the function that says whether this check would have noticed."""


def _adam(gradient: Tensor) -> Tensor:
    """The update of Adam's first step.

    Both moving averages then contain only this gradient, and bias correction cancels their decay
    factors.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1.
    """
    return -LEARNING_RATE * gradient / (gradient.abs() + ADAM_EPS)


def _close(measured: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    try:
        torch.testing.assert_close(measured.to(dtype), expected.to(dtype))
    except AssertionError:
        return False
    return True
