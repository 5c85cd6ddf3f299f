"""The mean over ranks of means that divide by different counts: tokens, weights, positives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.causes.uneven_shards_weighted_equally import (
    is_mean_over_examples,
    mean_of_means,
)
from ddp_equivalence.diagnosis.divisors import (
    ClassWeights,
    class_weights,
    counts_of_parts,
    is_weighted_mean,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction, Words
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss
from ddp_equivalence.diagnosis.lines.of_reduction import averages, is_unseen, line_of_reduction
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.means_of_parts import Over, nearest_mean
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' means, where a count of the batch makes their mean the big batch."""
    if is_mean_over_examples(view):
        return ()
    predictions = mean_of_means(view)
    divisor = counted(view) if predictions else None
    if divisor is None:
        return ()
    return [
        replace(one, detail="; ".join(filter(None, (divisor, one.detail)))) for one in predictions
    ]


def counted(view: View) -> str | None:
    """What the loss divides by, in words, if each part's count of it gives the big batch.

    None if nothing does; "" for a loss that is known to divide by counts of its own.

    Parts with weights of their own would fit many a loss that is no mean, or that is random.
    """
    divisor = _divisor(view)
    if divisor is not None:
        return f"the loss divides by {divisor if isinstance(divisor, str) else divisor.text}"
    # A loss of the catalogue is a mean over its own counts, of one term or of several.
    return "" if isinstance(view.setting.case.loss, str) else None


def _divisor(view: View) -> str | ClassWeights | None:
    """The unit of the count, or the weights of classes, by which the loss divides, if known."""
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank]
    for unit, counts in counts_of_parts(view, parts).items():
        total = sum(counts)
        if total > 0 and min(counts) >= 0 and is_weighted_mean(view, parts, counts):
            return unit
    return class_weights(view, parts)


def _of_micro_batches(view: View) -> bool:
    """True if the counts of micro-batches differ, and not only those of whole ranks."""
    several = any(len(parts) > 1 for parts in view.parts.by_rank or ())
    return several and nearest_mean(view) is not Over.WINDOW


def words(view: View) -> Words | None:
    """The same of micro-batches, where it is their means that count equally."""
    if not _of_micro_batches(view):
        return None
    whose = "its own count"
    if nearest_mean(view) is Over.ALL_RANKS:
        whose = "its count on all ranks"
    return Words(
        f"Each micro-batch's loss divides by {whose} (tokens, weights, positives), and these means "
        "count equally.",
        "means of unequal micro-batches weigh equally",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where each rank divides by its own count, and where the means are averaged."""
    own = "divides by the rank's own count"
    if _of_micro_batches(view):
        own = "divides by the count of one micro-batch"
    if view.world_size == 1:
        return in_order(view, line_of_loss(view, own, True))
    return in_order(
        view,
        line_of_loss(view, own, True),
        line_of_reduction(view, lambda seen: f"{seen}: all count equally"),
    )


def fix(view: View) -> str:
    """Divide by the count of all ranks."""
    count, unit = view.world_size, "count"
    if isinstance(_divisor(view), ClassWeights):
        unit = "sum of the weights"
    if count == 1:
        return f"divide each micro-batch's summed loss by the {unit} of the whole window."
    window = "the whole window on " if _of_micro_batches(view) else ""
    summed = f"divide the summed loss by the {unit} of {window}all ranks"
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
    words=words,
    limits_must_catch=True,
)
