"""The wrapper was freed between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, indication_if
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.observation import Observation


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


def lines(view: View) -> Sequence[PointedLine]:
    """Where the wrapper is made that is freed, and the backward before which it is gone."""
    calls = view.observed.calls
    freed = {id(call) for seen in view.observed.by_rank.values() for call in _freed(seen)}
    made = calls.places(Kind.WRAP, where=lambda call: id(call) in freed)
    return in_order(
        view,
        *(place.pointed("nothing holds this wrapper until backward", True) for place in made[-1:]),
        *(place.pointed("the wrapper is gone here") for place in calls.backwards[-1:]),
    )


def _freed(seen: Observation) -> list[Call]:
    """The calls that made the wrappers of one rank that were freed before backward."""
    made = [call for call in seen.calls if call.kind is Kind.WRAP]
    if len(made) != len(seen.wrappers):
        return []
    return [call for call, wrapper in zip(made, seen.wrappers, strict=True) if wrapper.freed]


def fix(view: View) -> str:
    """Keep the wrapper."""
    return "keep the DistributedDataParallel in a variable that lives until backward has ended."


HYPOTHESIS = Hypothesis(
    name="wrapper_dropped",
    sentence="The DistributedDataParallel was freed before backward, so nothing was reduced.",
    look_at="the variable that holds the wrapper: it must live until backward has ended, and "
    "loss(DDP(model), ...) has none",
    predict=no_all_reduce.predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
    headline="the wrapper is freed before backward",
    lines=lines,
    fix=fix,
)
