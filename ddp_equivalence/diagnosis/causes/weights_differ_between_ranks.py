"""The ranks went forward from different weights."""

from __future__ import annotations

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.view import View


def indication(view: View) -> Indication | None:
    """Compares the digests of the weights before each rank's first forward pass."""
    ranks_by_digest: dict[str, list[int]] = {}
    for rank, observation in view.observed.by_rank.items():
        if observation.forwards:
            ranks_by_digest.setdefault(observation.forwards[0].weights, []).append(rank)
    if not ranks_by_digest:
        return None
    if len(ranks_by_digest) == 1:
        return Indication(False, "all ranks went forward from the same weights")
    groups = "; ".join(", ".join(map(str, ranks)) for ranks in ranks_by_digest.values())
    because = f"the weights before the first forward pass differ: ranks {groups}"
    return Indication(True, because, conclusive=True)


HYPOTHESIS = Hypothesis(
    name="weights_differ_between_ranks",
    sentence="The ranks did not go forward from the same weights, so that gradients of different "
    "models were averaged.",
    look_at="a broadcast of the initial weights (DistributedDataParallel does it, averaging by "
    "hand does not), and seeds that depend on the rank",
    indication=indication,
    invalidates_gradients=True,
    tell_apart="The gradients cannot tell: compare the weights before the forward pass.",
)
