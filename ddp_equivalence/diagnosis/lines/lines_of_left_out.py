"""The lines where the gradients of some ranks are lost."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.lines.lines_around_reduction import lines_of_exchange
from ddp_equivalence.diagnosis.lines.paths_of_ranks import where_they_part
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.followed_values import line_that_sums
from ddp_equivalence.diagnosis.whereabouts.pieces import pieces_of
from ddp_equivalence.measurement.calls import Call, Kind


def lines_of_left_out(view: View, ranks: Sequence[int]) -> Sequence[PointedLine]:
    """Where the gradients of these ranks are cleared, never computed, or reduced without them.

    ``ranks``: those that are left out; () if these are not known.
    """
    if not ranks:
        return ()
    who = ranks_by_number(ranks)
    note = f"clears gradients on {who}"
    cleared = [place.pointed(note, is_fault=True) for place in _cleared_by(view, ranks)[-1:]]
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
    note = f"DDP reduces here; the gradients of {who} are missing in the result"
    return [place.pointed(note, is_fault=True) for place in reduced[-1:]]


def _sums_without(view: View, ranks: Sequence[int]) -> list[PointedLine]:
    """Where tensors are received point to point, or where gathered ones are added up."""
    others = [rank for rank in range(view.world_size) if rank not in ranks]
    pieces = pieces_of(view)
    if pieces is None or not others:
        return []
    return (
        lines_of_exchange(view, others[0], only_if_few=True)
        or line_that_sums(pieces, others[0], others)
        or lines_of_exchange(view, others[0])
    )


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


def _cleared_by(view: View, ranks: Sequence[int]) -> list[Place]:
    """The lines where only these ranks clear gradients after they have computed some."""

    def clears(call: Call) -> bool:
        return call.change is not None and call.change.cleared and call.backwards > 0

    places = view.observed.calls.changes(clears)
    return [place for place in places if set(place.ranks) == set(ranks)]


def _lines_of_zero(view: View, ranks: Sequence[int]) -> Sequence[PointedLine]:
    """The last line that computed a loss whose gradient is zero."""
    note = f"the gradient of {ranks_by_number(ranks)} is zero"
    places = view.observed.calls.places(Kind.LOSS_FUNCTIONS) or view.observed.calls.backwards
    there = [place for place in places if set(ranks) <= set(place.ranks)]
    return [place.pointed(note, is_fault=True) for place in there[:1]]


def _reduced_without(view: View, ranks: Sequence[int]) -> list[Place]:
    """The first line that reduces gradients among others and has no group with these ranks.

    If there is none, the last line whose groups do not join these ranks with others.
    """
    reductions = view.observed.calls.reductions
    absent = [one for one in reductions if not set(ranks) & set().union(*one.groups)]
    apart = [one for one in reductions if not set(ranks) & _partners(one, ranks)]
    return absent[:1] or apart[-1:]


def _partners(place: Place, ranks: Sequence[int]) -> set[int]:
    """The ranks of the groups of this place that hold another rank than these."""
    return {rank for group in place.groups if set(group) - set(ranks) for rank in group}


def _groups_made(view: View, without: Sequence[Place], ranks: Sequence[int]) -> list[Place]:
    """The line that made the group which lacks these ranks; one of their node, if there is one."""
    groups = {group for place in without for group in place.groups}
    calls = view.observed.calls
    if not without and calls.places(Kind.WRAP):
        return calls.places(Kind.NEW_GROUP, where=lambda call: not set(ranks) & set(call.ranks))[:1]
    made = calls.places(Kind.NEW_GROUP, where=lambda call: tuple(sorted(call.ranks)) in groups)
    nodes = [set(node) for node in view.setting.ranks_by_node if set(node) & set(ranks)]
    near = [place for place in made if any(node & set(place.first.ranks) for node in nodes)]
    return (near or made)[:1]
