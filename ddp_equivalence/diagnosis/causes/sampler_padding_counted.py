"""Examples that pad all shards to the same length are counted twice."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes.ranks_shuffle_apart import ranks_shuffled_apart
from ddp_equivalence.diagnosis.examples_read import (
    all_ranks_read_the_same,
    examples_seen,
    predictions_from_examples_read,
    read_more_than_once,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.indications import indication_if
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The gradient of all examples that were read, if some examples were read more than once."""
    repeated = read_more_than_once(view)
    if not repeated or all_ranks_read_the_same(view) or ranks_shuffled_apart(view):
        return ()
    return predictions_from_examples_read(
        view, f"{examples_seen(view, repeated)} read more than once"
    )


def indication(view: View) -> Indication | None:
    """Counts how often each example was read."""
    if view.observed.examples_read is None:
        return None
    repeated = read_more_than_once(view)
    return indication_if(
        bool(repeated),
        f"{examples_seen(view, repeated)} (of {view.setting.example_count}) read more than once",
        "no example was read twice",
    )


HYPOTHESIS = Hypothesis(
    name="sampler_padding_counted",
    sentence="Some examples were read more than once and counted each time. A sampler does this to "
    "pad all shards to the same length.",
    look_at="DistributedSampler(drop_last=False) where the number of examples is not a multiple of "
    "the number of ranks: give the repeated examples no weight, or use uneven shards with a global "
    "mean",
    predict=predict,
    indication=indication,
    tell_apart="Use a multiple of the number of ranks as the number of examples: no padding is "
    "then needed.",
)
