"""Batch normalisation with the statistics of each rank's own shard."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    found = view.contributions()
    if found is None or view.part_count == 1 or not view.has_batch_norm:
        return ()
    ways = [found.mean(0), *view.put_together()]
    return tuple(Way(view.everywhere(way)) for way in ways)


HYPOTHESIS = Hypothesis(
    name="batch_norm_local_statistics",
    sentence="Batch norm normalises with the statistics of each rank's shard. This is a property "
    "of the model, not a fault of the reduction.",
    look_at="SyncBatchNorm, or a normalisation that does not look across examples",
    predict=predict,
    tell_apart="the same model in eval mode",
    of_the_rule=True,
)
