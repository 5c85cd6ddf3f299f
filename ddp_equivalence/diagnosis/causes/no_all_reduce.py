"""Every rank kept the gradient of its own shard, for a reason that the evidence does not tell."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View

TELL_APART = "nothing in the gradients: what was called, with which flags, and what was sent"


def predict(view: View) -> Sequence[Way]:
    if view.world_size == 1 or len(view.ranks) != view.world_size:
        return ()
    ways = [Way(view.of_the_ranks(own)) for own in view.owns]
    unseen = view.seen is None and view.measured.numel() > 0
    if unseen and not view.only_some_differ and view.ranks_differ:
        # Whatever each rank's own gradient is: reduced, they would have been the big batch.
        apart = view.measured - view.measured.mean(0)
        for divisor, detail in ((1, ""), (view.world_size, "their sum is the big batch")):
            ways.append(Way(apart + view.expected / divisor, detail, informed=True))
    return tuple(ways)


def sign(view: View) -> Sign | None:
    sent = indications.reduced_elements(view)
    least = min(2, sum(view.selection.sizes.values()))
    if sent is not None and sent < least and not indications.wrappers(view):
        return Sign(True, "no gradient went through a collective, and there was no wrapper")
    return None


HYPOTHESIS = Hypothesis(
    name="no_all_reduce",
    sentence="Nothing was reduced: every rank holds the gradient of its own shard.",
    look_at="the call of the wrapper (ddp(...), not ddp.module(...)), no_sync, and whether the "
    "wrapper is still alive when backward runs",
    predict=predict,
    sign=sign,
    tell_apart=TELL_APART,
    of_the_rule=True,
)
