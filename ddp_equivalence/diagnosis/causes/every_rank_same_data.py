"""All ranks read the same examples."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import examples_read, indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.read is not None:
        return examples_read.as_read(view) if examples_read.all_the_same(view) else ()
    found = view.contributions()
    if found is None or view.world_size == 1:
        return ()
    return tuple(
        Way(view.everywhere(row), f"that of rank {rank}") for rank, row in enumerate(found)
    )


def sign(view: View) -> Sign | None:
    if view.read is None:
        return None
    read = sorted({i for part in view.read[0] for i in part})
    return indications.only_if(
        examples_read.all_the_same(view),
        f"every rank read {examples_read.numbers(read)}",
        "the ranks read different examples",
    )


HYPOTHESIS = Hypothesis(
    name="every_rank_same_data",
    sentence="All ranks read the same examples, so that the average is over copies of one shard.",
    look_at="a DistributedSampler that is missing, or that every rank makes with the same rank",
    predict=predict,
    sign=sign,
    tell_apart="nothing in the gradients: which examples each rank reads",
)
