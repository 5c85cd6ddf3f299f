"""The mean over ranks of means that divide by different counts: tokens, weights, positives."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes.uneven_shards_weighted_equally import (
    is_mean_over_examples,
    mean_of_means,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.lines_in_order import in_order
from ddp_equivalence.diagnosis.lines_of_reduction import averages, is_unseen, line_of_reduction
from ddp_equivalence.diagnosis.loss_lines import line_of_loss
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' means, where the big batch does not weight by examples."""
    return () if is_mean_over_examples(view) else mean_of_means(view)


def lines(view: View) -> Sequence[PointedLine]:
    """Where each rank divides by its own count, and where the means are averaged."""
    return in_order(
        view,
        line_of_loss(view, "divides by the rank's own count", True),
        line_of_reduction(view, lambda seen: f"{seen}: all count equally"),
    )


def fix(view: View) -> str:
    """Divide by the count of all ranks."""
    count = view.world_size
    summed = "divide the summed loss by the count of all ranks"
    if is_unseen(view):
        return f"{summed}; under DDP, multiply it by {count} too."
    if averages(view):
        return f"{summed}, and multiply it by {count}, the number of ranks."
    return f"{summed}, and add the ranks' gradients up."


HYPOTHESIS = Hypothesis(
    name="token_counts_weighted_equally",
    sentence="Every rank's loss divides by the rank's own count (tokens, weights, positives), and "
    "these means count equally.",
    look_at="the divisor of the loss: all-reduce the count, and multiply the summed loss by world "
    "size / count",
    predict=predict,
    tell_apart="Give all ranks equal counts: only this difference then goes away.",
    headline="means over unequal counts weigh equally",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
)
