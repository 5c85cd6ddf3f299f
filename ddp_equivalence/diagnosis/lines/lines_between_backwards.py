"""The lines that clear or set gradients between two backward passes of one step."""

from __future__ import annotations

from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind


def backward_count(view: View) -> int:
    """How often the lowest rank that was observed called backward in this step."""
    calls = view.observed.calls
    of_rank = calls.of(min(calls.by_rank, default=0))
    return sum(call.kind is Kind.BACKWARD for call in of_rank)


def lines_that_clear(view: View) -> list[Place]:
    """The lines that clear gradients, or set them to something else, between two backwards.

    Reducing a gradient does not count, nor does multiplying it by a number.
    """
    calls = view.observed.calls
    begun = {
        rank: [call.backwards for call in of_rank if call.kind is Kind.BACKWARD]
        for rank, of_rank in calls.by_rank.items()
    }
    rank = min(begun, default=0)
    if not begun or len(begun[rank]) < 2:
        return []
    first, last = begun[rank][0], begun[rank][-1]  # the numbers of backwards before these

    def between(call: Call) -> bool:
        return first < call.backwards <= last and not call.in_backward

    cleared = calls.changes(
        lambda call: between(call) and call.change is not None and call.change.cleared
    )
    asked = calls.places(Kind.ZERO_GRAD, where=between)
    if cleared or asked:
        return [*asked, *cleared]
    return calls.changes(
        lambda call: between(call) and call.change is not None and call.change.factor is None
    )
