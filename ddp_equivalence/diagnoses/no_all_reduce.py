"""Every rank kept the gradient of its own shard."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_equivalence.diagnoses.hypothesis import Hypothesis, View


def predict(view: View) -> Sequence[Tensor]:
    found = view.contributions()
    if found is None or view.world_size == 1 or len(view.ranks) != view.world_size:
        return ()
    return (found[list(view.ranks)],)


HYPOTHESIS = Hypothesis(
    name="no_all_reduce",
    sentence="Nothing was reduced: every rank holds the gradient of its own shard.",
    look_at="the call of the wrapper (ddp(...), not ddp.module(...)), no_sync, and whether the "
    "wrapper is still alive when backward runs",
    predict=predict,
)
