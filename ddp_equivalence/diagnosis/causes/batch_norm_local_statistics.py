"""Batch normalisation with the statistics of each rank's own shard."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction, Words
from ddp_equivalence.diagnosis.lines.of_loss import BATCH_NORMS, module_lines
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of gradients that were each computed with the statistics of one part alone."""
    contributions = view.parts.contributions()
    if contributions is None or view.parts.count == 1 or not view.setting.has_batch_norm:
        return ()
    results = [contributions.mean(0), *view.averages_of_node_sums()]
    return tuple(Prediction(view.on_every_rank(result)) for result in results)


def lines(view: View) -> Sequence[PointedLine]:
    """The first batch norm in the forward pass."""
    part = "rank" if view.world_size > 1 else "micro-batch"
    return module_lines(view, BATCH_NORMS, f"normalises over the examples of one {part}")


def words(view: View) -> Words | None:
    """One rank has only micro-batches to take statistics of."""
    if view.world_size > 1:
        return None
    return Words(HYPOTHESIS.sentence, "batch norm uses each micro-batch's own statistics")


def fix(view: View) -> str:
    """Synchronise the statistics, or leave them out."""
    return "none is needed; use SyncBatchNorm (on GPUs), or compare in eval mode."


HYPOTHESIS = Hypothesis(
    name="batch_norm_local_statistics",
    sentence="Batch norm normalises with the statistics of each rank's shard or micro-batch. This "
    "is a property of the model, not a fault of the reduction.",
    look_at="the batch norm: use SyncBatchNorm, or a normalisation of each example by itself",
    predict=predict,
    tell_apart="Put the model in eval mode: this difference then goes away.",
    headline="batch norm uses each rank's own statistics",
    lines=lines,
    fix=fix,
    words=words,
    limits_must_catch=True,
)
