"""The wrapper was freed between forward and backward."""

from __future__ import annotations

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.indications import indication_if
from ddp_equivalence.diagnosis.view import View


def indication(view: View) -> Indication | None:
    """Looks for a DistributedDataParallel that was gone when backward began."""
    if not view.observed.by_rank:
        return None
    return indication_if(
        any(wrapper.freed for wrapper in view.observed.wrappers),
        "the DistributedDataParallel that ran the forward pass was gone when backward began",
        "no DistributedDataParallel was freed before its backward",
        conclusive=True,
    )


HYPOTHESIS = Hypothesis(
    name="wrapper_dropped",
    sentence="The DistributedDataParallel was freed before backward, so nothing was reduced.",
    look_at="the variable that holds the wrapper: it must live until backward has ended, and "
    "loss(DDP(model), ...) has none",
    predict=no_all_reduce.predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
)
