"""Every forward pass ran under no_sync, or with require_backward_grad_sync off."""

from __future__ import annotations

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View


def sign(view: View) -> Sign | None:
    if not view.observed:
        return None
    flags = [flag for one in indications.wrappers(view) for flag in one.synchronised]
    if not flags:
        return Sign(False, "no DistributedDataParallel was called")
    return indications.only_if(
        not any(flags),
        f"each of {len(flags)} forward passes ran with synchronisation off",
        "a forward pass ran with synchronisation on",
        decides=True,
    )


HYPOTHESIS = Hypothesis(
    name="no_sync_left_on",
    sentence="DistributedDataParallel was told not to synchronise in any forward pass, so nothing "
    "was reduced.",
    look_at="no_sync() around the last micro-batch too, or require_backward_grad_sync left False: "
    "the forward pass decides, not the backward",
    predict=no_all_reduce.predict,
    sign=sign,
    tell_apart=no_all_reduce.TELL_APART,
)
