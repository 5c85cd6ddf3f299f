"""The ranks began their forward passes with different weights."""

from __future__ import annotations

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.view import View


def indication(view: View) -> Indication | None:
    """Compares the digests of the weights before each rank's first forward pass."""
    ranks_by_digest: dict[str, list[int]] = {}
    for rank, observation in view.observed.by_rank.items():
        if observation.forwards and observation.forwards[0].weights:
            ranks_by_digest.setdefault(observation.forwards[0].weights, []).append(rank)
    if not ranks_by_digest:
        return None
    if len(ranks_by_digest) == 1:
        return Indication(False, "all ranks began the forward pass with the same weights")
    groups = "; ".join(ranks_by_number(ranks) for ranks in ranks_by_digest.values())
    because = f"before the first forward pass, weights differ between these groups: {groups}"
    return Indication(True, because, conclusive=True)


HYPOTHESIS = Hypothesis(
    name="weights_differ_between_ranks",
    sentence="The ranks did not begin the forward pass with the same weights, so that gradients of "
    "different models were averaged.",
    look_at="the broadcast of the initial weights (DistributedDataParallel does it; code that "
    "averages by hand must do it too), and seeds that depend on the rank",
    indication=indication,
    invalidates_gradients=True,
    tell_apart="Gradients alone cannot decide: compare the weights before the forward pass.",
)
