"""All ranks read the same examples."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.examples_read import (
    all_ranks_read_the_same,
    examples_seen,
    predictions_from_examples_read,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.indications import indication_if
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The gradient of what all ranks read; if that is unknown, of the shard of any one rank."""
    if view.observed.examples_read is not None:
        return predictions_from_examples_read(view) if all_ranks_read_the_same(view) else ()
    contributions = view.parts.contributions()
    if contributions is None or view.world_size == 1:
        return ()
    return tuple(
        Prediction(view.on_every_rank(contribution), f"the shard of rank {rank}")
        for rank, contribution in enumerate(contributions)
    )


def indication(view: View) -> Indication | None:
    """Compares the examples that each rank read."""
    if view.observed.examples_read is None:
        return None
    read_by_rank_0 = sorted({i for part in view.observed.examples_read[0] for i in part})
    return indication_if(
        all_ranks_read_the_same(view),
        f"every rank read {examples_seen(view, read_by_rank_0)}",
        "the ranks read different examples",
    )


HYPOTHESIS = Hypothesis(
    name="every_rank_same_data",
    sentence="All ranks read the same examples, so that the average is over copies of one shard.",
    look_at="a DistributedSampler: it is missing, or every rank passes it the same rank",
    predict=predict,
    indication=indication,
    tell_apart="Gradients alone cannot decide: compare the examples that the ranks read.",
)
