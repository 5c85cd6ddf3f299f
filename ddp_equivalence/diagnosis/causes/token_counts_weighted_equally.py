"""The mean over ranks of means that divide by different counts: tokens, weights, positives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.causes.uneven_shards_weighted_equally import (
    is_mean_over_examples,
    mean_of_means,
)
from ddp_equivalence.diagnosis.divisors import counts_of_parts, is_weighted_mean
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.lines.lines_in_order import in_order
from ddp_equivalence.diagnosis.lines.lines_of_reduction import (
    averages,
    is_unseen,
    line_of_reduction,
)
from ddp_equivalence.diagnosis.lines.loss_lines import line_of_loss
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' means, where a count of the batch makes their mean the big batch."""
    if is_mean_over_examples(view):
        return ()
    predictions = mean_of_means(view)
    divisor = counted(view) if predictions else None
    return () if divisor is None else [replace(one, detail=divisor) for one in predictions]


def counted(view: View) -> str | None:
    """What the loss divides by, in words, if each part's count of it gives the big batch.

    None if nothing does; "" for a loss that is known to divide by counts of its own.

    Parts with weights of their own would fit many a loss that is no mean, or that is random.
    """
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank]
    for unit, counts in counts_of_parts(view, parts).items():
        total = sum(counts)
        if total > 0 and min(counts) >= 0 and is_weighted_mean(view, parts, counts):
            return f"the loss divides by {unit}"
    # A loss of the catalogue is a mean over its own counts, of one term or of several.
    return "" if isinstance(view.setting.case.loss, str) else None


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
        return f"{summed}, and multiply it by {count} (world size)."
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
