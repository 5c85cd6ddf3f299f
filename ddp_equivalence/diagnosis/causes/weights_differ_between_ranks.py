"""The ranks went forward from different weights."""

from __future__ import annotations

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View


def sign(view: View) -> Sign | None:
    found: dict[str, list[int]] = {}
    for rank, seen in view.observed.items():
        if seen.forwards:
            found.setdefault(seen.forwards[0].weights, []).append(rank)
    if not found:
        return None
    if len(found) == 1:
        return Sign(False, "all ranks went forward from the same weights")
    groups = "; ".join(", ".join(map(str, ranks)) for ranks in found.values())
    return Sign(True, f"the weights before the first forward pass differ: ranks {groups}", True)


HYPOTHESIS = Hypothesis(
    name="weights_differ_between_ranks",
    sentence="The ranks did not go forward from the same weights, so that gradients of different "
    "models were averaged.",
    look_at="a broadcast of the initial weights (DistributedDataParallel does it, averaging by "
    "hand does not), and seeds that depend on the rank",
    sign=sign,
    comes_first=True,
    tell_apart="nothing in the gradients: the weights before the forward pass",
)
