"""Which calls reduce gradients among the wrong ranks, or those of different parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.lines.of_reduction import (
    groups_of,
    in_small_groups,
    led_only_to,
    lines_of_small_groups,
    lines_that_choose_groups,
    lines_that_left_out,
    lines_that_set_groups,
    names_in_small_groups,
)
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.reduced import Groups, groups_text, separate_groups
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.whereabouts import Whereabouts, distinct, ranked
from ddp_equivalence.measurement.calls import CodeLine, CollectiveCall, Contents, Kind

ADDING = ("all_reduce", "reduce")

# Only some parameters differ: those that a wrapper reduces in a group of only some ranks.


def fault_of_small_groups(view: View) -> Whereabouts | None:
    """Which call gave the parameters that differ, and only these, a group without all ranks."""
    wrong = view.measured.differing
    in_small = names_in_small_groups(view)
    if not wrong or wrong != in_small or len(wrong) == len(view.parameters.names):
        return None  # what is right in such a group was reduced between the groups as well
    names = tuple(name for name in view.parameters.names if name in wrong)
    places = [place for place in in_small_groups(view) if wrong & set(place.names)]
    where = groups_text(tuple(sorted({one for place in places for one in groups_of(place)})))
    what = " and ".join(dict.fromkeys(place.first.what for place in places))
    return Whereabouts(
        "reduction",
        "some parameters are reduced in smaller groups",
        f"{what} was given {names_text(names)} with {where}, not with all {view.world_size} ranks. "
        "All other parameters are right.",
        distinct(lines_of_small_groups(view, names)),
        names,
        tuple(range(view.world_size)),
        fix=f"give {names_text(names)} the mesh or group of all {view.world_size} ranks.",
    )


# A collective does nothing on a rank that is not in its group: torch prints a warning.


def fault_of_non_members(view: View) -> Whereabouts | None:
    """Which ranks call a collective in a group without them; None if none was seen to do so."""
    place = next(iter(view.observed.calls.places(Kind.NOT_IN_GROUP)), None)
    if place is None or place.line is None:
        return None
    who = ranked(place.ranks, view.world_size)
    what, one = place.first.what, len(place.ranks) == 1
    return Whereabouts(
        "reduction",
        f"{what} does nothing on {who}",
        f"On {who}, {what} does nothing: the group that it is given is one without "
        f"{'this rank' if one else 'these ranks'}.",
        distinct(
            [
                place.pointed(f"{who}: not in this group", is_fault=True),
                *lines_that_set_groups(view, [place]),
            ]
        ),
        view.parameters.names,
        tuple(place.ranks),
        fix="give each rank a group that it is in.",
        explains_all=True,
    )


# Ranks that go through different lists of parameters add up what does not belong together.


def fault_of_mixed_parameters(view: View) -> Whereabouts | None:
    """Which call adds up gradients of different parameters; None if none was seen to do so."""
    calls = view.observed.calls
    # Pairs are made of all collectives, since zeros for a missing gradient are not known as one.
    issued = ([one for one in calls.of(n) if one.collective] for n in range(view.world_size))
    for together in zip(*issued, strict=False):
        found = [call.collective for call in together if call.collective is not None]
        if any(len(one.ranks) < view.world_size for one in found):
            return None
        if not all(map(reduces_gradients, together)):
            continue
        names = [one.names for one in found]
        apart = (rank for rank, one in enumerate(names) if not {*one} & {*names[0]})
        other = next(apart, 0)
        if not all(names) or not other:
            continue
        one, two = names_text(names[0]), names_text(names[other])
        mixed = f"{one} on rank 0 and of {two} on rank {other}"
        place = next(one for one in calls.reductions if one.line == together[0].at)
        lists = [replace(one, is_fault=False) for one in lines_that_left_out(view, place)]
        return Whereabouts(
            "reduction",
            "gradients of different parameters are added up",
            f"One {found[0].op} adds up the gradients of {mixed}: the ranks go through different "
            "lists of parameters.",
            distinct([*lists, place.pointed(f"adds up those of {mixed}", is_fault=True)]),
            view.parameters.names,
            tuple(range(view.world_size)),
            fix="reduce the same parameters in the same order on every rank, with zeros for those "
            "that have no gradient.",
            what="gradients missing",
            explains_all=True,
        )
    return None


# After a reduce_scatter each rank has the sum of another part, and parts are not to be added up.


def fault_of_mixed_shards(view: View) -> Whereabouts | None:
    """Which call adds up parts that a reduce_scatter has just dealt to different ranks."""
    calls = view.observed.calls
    parts = [two for rank in range(view.world_size) if (two := _dealt_then_added(view, rank))]
    if len(parts) < view.world_size:
        return None
    dealt = tuple(sorted({scatter.ranks for scatter, _ in parts}))
    if len({len(group) for group in dealt}) > 1:
        return None
    added = groups_text(tuple(sorted({total.ranks for _, total in parts})))
    same_part = groups_text(tuple(sorted(zip(*dealt, strict=True))))
    made = _lines_of_second_group(view, parts[0][1].ranks)
    op = parts[0][1].op
    chosen = lines_that_choose_groups(view, calls.places(Kind.COLLECTIVE))
    wrappers = view.observed.calls_of_all_steps.places(Kind.SHARDING)[:1]
    return Whereabouts(
        "reduction",
        "different parts of the gradients are added up",
        f"After a reduce_scatter in {groups_text(dealt)}, {op} in {added} adds up different parts.",
        distinct(
            [
                *(PointedLine(line, f"makes the groups of this {op}", True) for line in made),
                *chosen,
                *(place.pointed(f"{op} in {added}", is_fault=not made) for place in wrappers),
            ]
        ),
        view.parameters.names,
        tuple(range(view.world_size)),
        fix=f"add up in {same_part}, whose ranks have the same part.",
        explains_all=True,
    )


def _lines_of_second_group(view: View, ranks: tuple[int, ...]) -> list[CodeLine]:
    """The line that had the last group of these ranks made, and no other group."""
    calls = view.observed.calls_of_all_steps.of(ranks[0])
    made = [one for one in calls if one.kind is Kind.NEW_GROUP]
    last = next((one for one in reversed(made) if one.ranks == ranks), None)
    if last is None:
        return []
    line = led_only_to(last, [one for one in made if one.callers != last.callers])
    return [line] if line is not None else []


def _dealt_then_added(view: View, rank: int) -> tuple[CollectiveCall, CollectiveCall] | None:
    """The first reduce_scatter whose parts this rank adds to another one of the same whole."""
    dealt: CollectiveCall | None = None
    began = False
    for call in view.observed.calls.of(rank):
        one = call.collective
        if one is None or not one.elements:
            continue
        if dealt is not None and one.op in ADDING and one.elements > 1:  # one may be a norm
            is_the_part = one.elements * len(dealt.ranks) == dealt.elements
            is_the_part &= call.in_backward == began and not _is_of_others(one, dealt)
            if is_the_part and len({*one.ranks} & {*dealt.ranks}) > 1:
                return dealt, one
        dealt = one if one.op.startswith("reduce_scatter") else None
        began = call.in_backward
    return None


def _is_of_others(one: CollectiveCall, dealt: CollectiveCall) -> bool:
    """True if a collective gets whole gradients of parameters that were not dealt."""
    whole = one.contents in (Contents.GRADIENTS, Contents.COPIES_OF_GRADIENTS)
    return whole and not {*one.names} & {*dealt.names}


# What the ranks of each group hold adds up to the big batch's gradient: only the sum is missing.


def fault_of_missing_sum(view: View) -> Whereabouts | None:
    """Which gradients still have to be added up in groups of ranks; None if that does not make all
    gradients right.
    """
    wrong, measured = sorted(view.measured.differing), view.measured
    if not wrong or not measured.is_known or not view.setting.every_rank_reports:
        return None
    places = view.parameters.positions_of(wrong)
    held, right = measured.by_rank[:, places], view.expected[places]
    for groups in _partitions(view):
        if all(nearly_equal(held[list(group)], held[list(group[:1])]) for group in groups):
            continue  # a factor is missing, not a sum
        sums = [held[list(group)].sum(0) for group in groups]
        size = len(groups[0])
        divisor = next(
            (n for n in (1, size) if all(nearly_equal(one / n, right) for one in sums)), 0
        )
        if divisor:
            return _missing_sum(
                view, groups, wrong, f", and divide by {size}" if divisor > 1 else ""
            )
    return None


def _missing_sum(view: View, groups: Groups, wrong: Sequence[str], divided: str) -> Whereabouts:
    names, within = names_text(wrong), groups_text(groups)
    which = "some gradients" if len(wrong) < len(view.parameters.names) else "gradients"
    places = [one for one in view.observed.calls.reductions if set(one.groups) <= set(groups)]
    left_out = [one for place in places for one in lines_that_left_out(view, place)]
    lines = [replace(one, is_fault=True) for one in left_out]
    backwards = view.observed.calls.backwards if not places else []
    what = "their mean" if divided else "their sum"
    return Whereabouts(
        "reduction",
        f"{which} are not added up in groups of ranks",
        f"Of {names}, the ranks of {within} hold different gradients, and {what} in each group is "
        "right.",
        distinct(
            [
                *lines,
                *(place.pointed(f"adds up others in {within}", not lines) for place in places),
                *(
                    place.pointed("", True, f"an all_reduce in {within}")
                    for place in backwards[-1:]
                ),
            ]
        ),
        tuple(wrong),
        tuple(range(view.world_size)),
        fix=f"all_reduce {names} in {within}{divided}.",
        what="gradients missing",
        explains_all=True,
    )


def _partitions(view: View) -> Iterator[Groups]:
    """The ways in which groups that the step has made or used divide up all ranks."""
    found: dict[tuple[int, ...], None] = {}
    for rank in range(view.world_size):
        for call in view.observed.calls_of_all_steps.of(rank):
            ranks = call.collective.ranks if call.collective is not None else call.ranks
            if call.kind in (Kind.COLLECTIVE, Kind.NEW_GROUP, Kind.EQUAL):
                found[tuple(sorted(ranks))] = None
    for size in sorted({len(group) for group in found} - {0, 1, view.world_size}):
        groups = tuple(group for group in found if len(group) == size)
        for first in groups:
            chosen = [first]
            for group in groups:
                if not any({*group} & {*one} for one in chosen):
                    chosen.append(group)
            if sum(map(len, chosen)) == view.world_size and first[0] == 0:
                yield tuple(sorted(chosen))


# Ranks that no collective joins cannot hold what the others computed.


def fault_of_separate_groups(view: View) -> Whereabouts | None:
    """Between which groups of ranks no gradient was exchanged; None if one joins all."""
    groups, calls = separate_groups(view), view.observed.calls
    if not groups or calls.places(Kind.POINT_TO_POINT):
        return None
    reduced = [
        place.pointed(f"{place.op} in {groups_text(place.groups)}", is_fault=True)
        for place in calls.reductions
    ]
    behind = lines_that_choose_groups(view, calls.places(Kind.COLLECTIVE))
    return Whereabouts(
        "reduction",
        "gradients stay within groups of ranks",
        f"The ranks exchange gradients in {groups_text(groups)}, and no collective joins these "
        "groups, so no rank can hold the mean over all ranks.",
        distinct([*reduced[-1:], *behind, *reduced[:-1]]),
        view.parameters.names,
        tuple(range(view.world_size)),
        fix=f"reduce over all {view.world_size} ranks, or between the groups as well.",
        explains_all=True,
    )
