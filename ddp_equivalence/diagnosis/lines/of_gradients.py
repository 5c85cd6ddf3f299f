"""The lines where gradients are lost, cleared, or kept back."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.decisions import where_they_part
from ddp_equivalence.diagnosis.lines.words import first_of, last_of
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

# The lines that clear or set gradients between two backward passes of one step.


def backward_count(view: View) -> int:
    """How often the lowest rank that was observed called backward in this step."""
    calls = view.observed.calls
    of_rank = calls.of(min(calls.by_rank, default=0))
    return sum(call.kind is Kind.BACKWARD for call in of_rank)


def lines_that_clear(view: View) -> list[CallSite]:
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

    cleared = calls.changes(lambda call: between(call) and call.clears)
    asked = calls.places(Kind.ZERO_GRAD, where=between)
    if cleared or asked:
        return [*asked, *cleared]
    return calls.changes(lambda call: between(call) and call.rewrites)


# The lines where the gradients of some ranks are lost.


def lines_of_left_out(view: View, ranks: Sequence[int]) -> Sequence[PointedLine]:
    """Where the gradients of these ranks are cleared, never computed, or reduced without them.

    ``ranks``: those that are left out; () if these are not known.
    """
    if not ranks:
        return ()
    who = ranks_by_number(ranks)
    cleared = last_of(_cleared_by(view, ranks), f"clears gradients on {who}")
    if cleared:
        return cleared
    parting = where_they_part(view, ranks)
    if set(ranks_without_gradient(view)) >= set(ranks):
        return [parting] if parting is not None else _lines_of_zero(view, ranks)
    without = _reduced_without(view, ranks)
    made = [place.pointed(is_fault=True) for place in _groups_made(view, without, ranks)]
    note = f"reduces without {who}"
    pointed = [*made, *(place.pointed(note, is_fault=not made) for place in without)]
    pointed = pointed or _sums_without(view, ranks)
    if pointed or parting is not None:
        return pointed or [one for one in (parting,) if one is not None]
    reduced = view.observed.calls.backwards if view.observed.wrappers else []
    return last_of(reduced, f"DDP reduces here; the gradients of {who} are missing in the result")


def _sums_without(view: View, ranks: Sequence[int]) -> list[PointedLine]:
    """The last collective behind backward."""
    last = view.observed.calls.places(
        Kind.COLLECTIVE, where=lambda call: call.backwards > 0 and not call.in_backward
    )[-1:]
    note = f"what is made of its result lacks {ranks_by_number(ranks)}"
    return [place.pointed(note, is_fault=True) for place in last]


def fix_of_left_out(view: View, ranks: Sequence[int]) -> str:
    """What to write so that the gradients of these ranks count."""
    size = view.world_size
    if ranks and _cleared_by(view, ranks):
        return f"keep the gradients of {ranks_by_number(ranks)}, and divide by {size}."
    if ranks and set(ranks_without_gradient(view)) >= set(ranks):
        return f"let {ranks_by_number(ranks)} compute the gradient of the examples given there."
    who = ranks_by_number(ranks) if ranks else "every rank"
    return f"let {who} take part in an all_reduce of all {size} ranks, and divide by {size}."


def ranks_without_gradient(view: View) -> tuple[int, ...]:
    """The ranks whose backward passes were seen to compute nothing but zeros."""
    if view.observed_gradients is None:
        return ()
    computed = view.local_gradients[0]
    return tuple(rank for rank in range(view.world_size) if not bool(computed[rank].any()))


def _cleared_by(view: View, ranks: Sequence[int]) -> list[CallSite]:
    """The lines where only these ranks clear gradients after they have computed some."""
    places = view.observed.calls.changes(lambda call: call.clears and call.backwards > 0)
    return [place for place in places if set(place.ranks) == set(ranks)]


def _lines_of_zero(view: View, ranks: Sequence[int]) -> Sequence[PointedLine]:
    """The last line that computed a loss whose gradient is zero."""
    note = f"the gradient of {ranks_by_number(ranks)} is zero"
    places = view.observed.calls.places(Kind.LOSS_FUNCTIONS) or view.observed.calls.backwards
    return first_of([place for place in places if set(ranks) <= set(place.ranks)], note)


def _reduced_without(view: View, ranks: Sequence[int]) -> list[CallSite]:
    """The first line that reduces gradients among others and has no group with these ranks.

    If there is none, the last line whose groups do not join these ranks with others.
    """
    reductions = view.observed.calls.reductions
    absent = [one for one in reductions if not set(ranks) & set().union(*one.groups)]
    apart = [one for one in reductions if not set(ranks) & _partners(one, ranks)]
    return absent[:1] or apart[-1:]


def _partners(place: CallSite, ranks: Sequence[int]) -> set[int]:
    """The ranks of the groups of this place that hold another rank than these."""
    return {rank for group in place.groups if set(group) - set(ranks) for rank in group}


def _groups_made(view: View, without: Sequence[CallSite], ranks: Sequence[int]) -> list[CallSite]:
    """The line that made the group which lacks these ranks; one of their node, if there is one."""
    groups = {group for place in without for group in place.groups}
    calls = view.observed.calls
    if not without and calls.places(Kind.WRAP):
        return calls.places(Kind.NEW_GROUP, where=lambda call: not set(ranks) & set(call.ranks))[:1]
    made = calls.places(Kind.NEW_GROUP, where=lambda call: tuple(sorted(call.ranks)) in groups)
    nodes = [set(node) for node in view.setting.ranks_by_node if set(node) & set(ranks)]
    near = [place for place in made if any(node & set(place.first.ranks) for node in nodes)]
    return (near or made)[:1]
