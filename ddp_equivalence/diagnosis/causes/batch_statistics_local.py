"""A penalty on statistics of the batch is computed from each rank's own shard."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes.contrastive_local_negatives import mean_of_local_losses
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.lines.of_loss import STATISTICS, loss_lines
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View

NAME = "batch_statistics_local"


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' losses, where the loss is known to use statistics of the batch."""
    return mean_of_local_losses(view) if view.setting.batch_coupled == NAME else ()


def lines(view: View) -> Sequence[PointedLine]:
    """The line that takes the statistics."""
    return loss_lines(view, STATISTICS, "statistics of one rank's examples")


def fix(view: View) -> str:
    """Gather what the statistics are of."""
    return "none is needed; take statistics of all ranks' outputs, gathered with their gradient."


HYPOTHESIS = Hypothesis(
    name=NAME,
    sentence="The loss has a term on statistics of the batch (variance, covariance), and every "
    "rank computes them from its own shard. This is a property of the loss, not a fault of the "
    "reduction.",
    look_at="the loss: gather the outputs of all ranks, with their gradient, before it takes "
    "statistics",
    predict=predict,
    tell_apart="Leave that term out of the loss: this difference then goes away.",
    headline="batch statistics are of each rank alone",
    lines=lines,
    fix=fix,
)
