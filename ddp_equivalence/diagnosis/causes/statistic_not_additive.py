"""The loss takes a statistic of its batch that is no mean: a root, a median, a quantile."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_equivalence.diagnosis.divisors import why_not_additive
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.residual import nearly_equal, unexplained
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View

NAME = "statistic_not_additive"

NEAR = 0.05
"""The loss is examined only if the mean of the ranks' gradients leaves less unexplained."""


def predict(view: View) -> Sequence[Prediction]:
    """The mean of what the ranks compute alone, if the loss is another statistic than a mean."""
    return tuple(Prediction(view.on_every_rank(mean)) for mean in _means(view) if _why(view))


def _means(view: View) -> list[Tensor]:
    """The means of the ranks' gradients that are near what the ranks hold."""
    contributions, setting = view.parts.contributions(), view.setting
    if contributions is None or view.parts.count == 1 or not view.measured.is_known:
        return []
    if setting.has_batch_norm or setting.batch_coupled not in (NAME, None):
        return []
    weighted = [
        len(shard) * row
        for shard, row in zip(view.parts.examples_by_rank, contributions, strict=True)
        if shard
    ]
    means = [
        contributions.mean(0),
        sum(weighted, 0 * view.expected) / max(1, setting.example_count),
        *view.averages_of_node_sums(),
    ]
    near = [
        mean
        for mean in means
        if unexplained(view.measured.by_rank, view.on_every_rank(mean)) < NEAR
        and not nearly_equal(mean, view.expected)
    ]
    return near if near and not view.examples.draws_random_numbers else []


def _why(view: View) -> str:
    return why_not_additive(view) if _means(view) else ""


def indication(view: View) -> Indication | None:
    """Asks the loss of the case, on parts of the big batch."""
    why = _why(view)
    return Indication(True, why) if why else None


def lines(view: View) -> Sequence[PointedLine]:
    """Where the loss of the rank's part begins its backward."""
    note = "of the statistic of this rank's part"
    return [place.pointed(note, is_fault=True) for place in view.observed.calls.backwards[-1:]]


def fix(view: View) -> str:
    """Take the statistic of all ranks' outputs."""
    return (
        "gather what the statistic is taken of from all ranks, with its gradient, or average the "
        "mean inside it."
    )


HYPOTHESIS = Hypothesis(
    name=NAME,
    sentence="The loss takes a statistic of its batch that is no mean over examples (a root of a "
    "mean, a logarithm, a median, a quantile), and every rank takes it of its own shard. This is a "
    "property of the loss, not a fault of the reduction.",
    look_at="the loss: reduce the mean inside the root or logarithm over all ranks, with its "
    "gradient, or gather the values that a median or quantile is taken of",
    predict=predict,
    indication=indication,
    tell_apart="Use the mean inside the statistic as the loss: this difference then goes away.",
    headline="the loss takes a statistic per rank",
    lines=lines,
    fix=fix,
)
