"""The wrapper was freed between forward and backward."""

from __future__ import annotations

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View


def sign(view: View) -> Sign | None:
    if not view.observed:
        return None
    freed = [one for one in indications.wrappers(view) if one.freed]
    return indications.only_if(
        bool(freed),
        "the DistributedDataParallel that had run forward was gone when backward began",
        "no DistributedDataParallel was freed before its backward",
        decides=True,
    )


HYPOTHESIS = Hypothesis(
    name="wrapper_dropped",
    sentence="The DistributedDataParallel was freed before backward, so nothing was reduced.",
    look_at="who holds the wrapper until backward has ended: loss(DDP(model), ...) drops it",
    predict=no_all_reduce.predict,
    sign=sign,
    tell_apart=no_all_reduce.TELL_APART,
)
