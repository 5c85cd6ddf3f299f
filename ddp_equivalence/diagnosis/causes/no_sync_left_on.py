"""Every forward pass ran under no_sync, or with require_backward_grad_sync off."""

from __future__ import annotations

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.indications import indication_if
from ddp_equivalence.diagnosis.view import View


def indication(view: View) -> Indication | None:
    """Looks at whether synchronisation was on in each forward pass."""
    if not view.observed.by_rank:
        return None
    synchronised = [flag for one in view.observed.wrappers for flag in one.synchronised]
    if not synchronised:
        return Indication(False, "no DistributedDataParallel was called")
    return indication_if(
        not any(synchronised),
        f"synchronisation was off in all {len(synchronised)} forward passes (of all ranks)",
        "synchronisation was on in a forward pass",
        conclusive=True,
    )


HYPOTHESIS = Hypothesis(
    name="no_sync_left_on",
    sentence="DistributedDataParallel was told not to synchronise in any forward pass, so nothing "
    "was reduced.",
    look_at="no_sync() that also encloses the last micro-batch, or require_backward_grad_sync left "
    "at False: DDP reads this flag in the forward pass, not in the backward",
    predict=no_all_reduce.predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
)
