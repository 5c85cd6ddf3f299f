"""The lines that changed buffers of the model, and which buffers differ between the ranks."""

from __future__ import annotations

from ddp_equivalence.diagnosis.step_calls import Place, StepCalls
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.observation import Forward


def buffer_changes(view: View) -> list[Place]:
    """The lines that changed buffers up to this step, in this step before the first backward.

    DistributedDataParallel writes to them too when it is made and called, so those lines come only
    where there is no other.
    """
    step = view.setting.step
    calls = StepCalls(
        {
            rank: tuple(call for call in seen.calls if (call.step, call.backwards) <= (step, 0))
            for rank, seen in view.observed.by_rank.items()
        }
    )
    places = calls.places(Kind.BUFFERS)
    for kinds in ((Kind.WRAP, Kind.FORWARD), (Kind.WRAP,)):
        of_ddp = {place.line for place in calls.places(*kinds)}
        others = [place for place in places if place.line not in of_ddp]
        if others:
            return others
    return places


def buffers_apart(view: View) -> tuple[str, ...]:
    """The buffers that differ between ranks before a forward pass of this step."""
    by_rank = [forwards_of(view, rank) for rank in view.observed.by_rank]
    if not by_rank:
        return ()
    apart: dict[str, None] = {}
    for at_once in zip(*by_rank, strict=False):
        held: dict[str, set[bytes]] = {}
        for forward in at_once:
            for name, value in forward.buffers.items():
                held.setdefault(name, set()).add(value.contiguous().numpy().tobytes())
        apart |= {name: None for name, values in held.items() if len(values) > 1}
    return tuple(apart)


def forwards_of(view: View, rank: int) -> list[Forward]:
    """The forward passes of one rank in this step."""
    forwards = view.observed.by_rank[rank].forwards
    return [one for one in forwards if one.step == view.setting.step]
