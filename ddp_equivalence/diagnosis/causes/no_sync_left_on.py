"""Every forward pass ran under no_sync, or with require_backward_grad_sync off."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, indication_if
from ddp_equivalence.diagnosis.lines.of_reduction import lines_of_no_sync
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


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


def lines(view: View) -> Sequence[PointedLine]:
    """Where synchronisation is switched off, and the last backward, which should reduce."""
    calls = view.observed.calls
    off = calls.places(Kind.SYNCHRONISATION, where=lambda call: not call.value)
    switched = [place.pointed("switches synchronisation off", True) for place in off[-1:]]
    switched = lines_of_no_sync(view) or switched
    backwards = [
        place.pointed("DDP reduces nothing in this backward", is_fault=not switched)
        for place in calls.backwards[-1:]
    ]
    return in_order(view, *switched, *backwards)


def fix(view: View) -> str:
    """Leave no_sync before the last forward pass."""
    passes = max((len(one.synchronised) for one in view.observed.wrappers), default=1)
    if passes > 1:
        return f"run the last of the {passes} forward passes outside no_sync."
    return "run the forward pass outside no_sync, with require_backward_grad_sync on."


HYPOTHESIS = Hypothesis(
    name="no_sync_left_on",
    sentence="DistributedDataParallel was told not to synchronise in any forward pass, so nothing "
    "was reduced.",
    look_at="no_sync() that also encloses the last micro-batch, or require_backward_grad_sync left "
    "at False: DDP reads this flag in the forward pass, not in the backward",
    predict=no_all_reduce.predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
    headline="synchronisation stays off in every forward",
    lines=lines,
    fix=fix,
)
