"""The lines of a reduction: what it reduces, in which groups, how often, and what it loses."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.decisions import conditions, decisions, where_they_part
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss, line_that_scales_loss
from ddp_equivalence.diagnosis.lines.origins import (
    Origin,
    Origins,
    choices,
    chosen,
    divided_by_in,
    divisors,
    given_at,
    gone_through,
    line_of_compared,
    made_of,
    of_line,
    set_at,
)
from ddp_equivalence.diagnosis.lines.source import (
    LOOPS,
    RunLines,
    SourceLine,
    called_name,
    place_at,
    place_of,
    run_lines,
)
from ddp_equivalence.diagnosis.lines.words import (
    counted,
    first_of,
    in_order,
    last_of,
    names_text,
    scaling_text,
)
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

SAME = 1e-3
"""Gradients have a common factor if this much of them, relative to their norm, has not."""


def by_hand(view: View) -> list[CallSite]:
    """The lines of the user's own code that reduce gradients outside a backward pass."""
    return [place for place in view.observed.calls.reductions if not place.first.in_backward]


def in_hook(view: View) -> list[CallSite]:
    """The lines that reduce gradients inside a communication hook, or that register the hook.

    A hook of torch itself has no line of the user's, so the line that registers it stands for it.
    """
    calls = view.observed.calls
    backwards = {place.line for place in calls.backwards}
    in_backward = [
        place
        for place in calls.reductions
        if place.first.in_backward and place.line not in backwards
    ]
    return in_backward or calls.places(Kind.HOOK)


def in_own_backwards(view: View) -> list[CallSite]:
    """The lines of backward methods of the user's own that talk to other ranks."""
    backwards = {place.line for place in view.observed.calls.backwards}
    places = view.observed.calls.collectives(lambda call, of: call.in_backward and of.elements > 1)
    methods = {
        (one.line.file, one.line.function)
        for seen in view.observed.by_rank.values()
        for one in seen.own_backwards
    }
    return [
        place
        for place in places
        if place.line not in backwards
        and any((one.file, one.function) in methods for one in (place.line, *place.first.callers))
    ]


def ddp_reduces(view: View) -> bool:
    """True if DDP was to reduce gradients that differ in the last backward pass, without a hook."""
    given = {
        name for place in view.observed.calls_of_all_steps.places(Kind.WRAP) for name in place.names
    }
    if given and not given & view.measured.differing:
        return False
    synchronises = any(wrapper.synchronised[-1:] == (True,) for wrapper in view.observed.wrappers)
    return synchronises and not view.observed.calls.places(Kind.HOOK)


def is_unseen(view: View) -> bool:
    """True if it was not seen what reduces the gradients, such as FSDP or this package."""
    return not (by_hand(view) or in_hook(view) or ddp_reduces(view))


def line_of_reduction(
    view: View, note: Callable[[str], str] = str, is_fault: bool = False, missing: str = ""
) -> PointedLine | None:
    """The last line at which gradients are reduced; None if none was seen.

    ``note`` gets what was seen to happen there, and returns what the report says of it.
    """
    for place in (by_hand(view) or in_hook(view))[-1:]:
        over = f"over {max(map(len, place.groups), default=0)} ranks"
        seen = f"{len(place.calls)} {_operation(place)}, {over}"
        if place.kind is Kind.HOOK:
            seen = hook_text(place)
        elif place.first.in_backward:
            hooks = view.observed.calls.places(Kind.HOOK)
            where = "in the communication hook" if hooks else "during backward"
            seen = f"{_operation(place)} {over}, {where}"
        return place.pointed(note(seen), is_fault, missing)
    for place in view.observed.calls.backwards[-1:] if ddp_reduces(view) else ():
        logged = [wrapper.logged.get("world_size") for wrapper in view.observed.wrappers]
        ranks = min([size for size in logged if isinstance(size, int)], default=view.world_size)
        return place.pointed(note(f"DDP averages over {ranks} ranks here"), is_fault, missing)
    for place in in_own_backwards(view)[-1:]:
        seen = f"{_operation(place)} over {len(place.groups[0])} ranks, in a backward method"
        return place.pointed(note(seen), is_fault, missing)
    return None


def line_that_scales_gradients(view: View, factor: float) -> PointedLine | None:
    """The last line that multiplies gradients by this number; None if none was seen."""
    for place in view.observed.calls.multiplied_by(factor)[-1:]:
        what = "the gradient" if len(place.names) == 1 else f"{len(place.names)} gradients"
        return place.pointed(scaling_text(what, factor), True)
    return None


def line_that_scales(view: View, factor: float) -> PointedLine | None:
    """The line that multiplies gradients or the loss by this number; None if none was seen."""
    return line_that_scales_gradients(view, factor) or line_that_scales_loss(view, factor)


def lines_of_factor(
    view: View, factor: float, loss: str = "", note: Callable[[str], str] = str, missing: str = ""
) -> Sequence[PointedLine]:
    """The line that multiplies gradients or the loss by this number, and where they are reduced.

    Without such a line: that of the loss, if ``loss`` says what is wrong with it, or else the
    reduction; something is ``missing`` there. ``note``: as in ``line_of_reduction``.
    """
    scaled = line_that_scales(view, factor)
    if scaled is not None:
        return in_order(view, line_of_reduction(view), scaled)
    made = line_of_loss(view, loss, True, missing) if loss else None
    if made is not None:
        return in_order(view, made, line_of_reduction(view, note))
    return in_order(view, line_of_reduction(view, note, True, missing))


def averages(view: View) -> bool:
    """True if the reduction itself divides by the number of ranks: DDP without a hook, or AVG."""
    if by_hand(view):
        return _operation(by_hand(view)[-1]).endswith("AVG")
    return ddp_reduces(view)


def common_factor(view: View) -> float | None:
    """The number that all gradients on all ranks are multiplied by; None if it is not the same."""
    factor = view.measured.factor
    if not factor:
        return None
    rest = (view.measured.by_rank - factor * view.expected_by_rank).norm()
    is_common = float(rest) <= SAME * float(view.measured.by_rank.norm())
    return factor if is_common else None


def hook_text(place: CallSite) -> str:
    """What a line does that registers a communication hook."""
    return f"gives DDP a communication hook, {place.first.what}"


def _operation(place: CallSite) -> str:
    collective = place.first.collective
    return "" if collective is None else f"{collective.op} {collective.reduce_op}".strip()


def way_to(view: View, call: Call) -> tuple[CodeLine, ...]:
    """The line that made a call and those that led to it, the innermost first, up to the function
    that called backward; of a call in a hook, only those of the hook.
    """
    line = call.at
    if line is None:
        return ()
    backward = {one.line for one in view.observed.calls.backwards}
    functions = {(one.file, one.function) for one in backward}
    way: list[CodeLine] = []
    for one in (line, *call.callers):
        if one in backward:
            break
        way.append(one)
        if (one.file, one.function) in functions:
            break
    return tuple(way)


def lines_that_left_out(view: View, place: CallSite) -> list[PointedLine]:
    """The line that kept some gradients from being reduced at this place; [] if none was seen.

    The first of these that was seen: a line that left the loop, a condition that was not always the
    same, and the line that made what the loop goes over.
    """
    run = run_lines(view, place.ranks[0])
    way = way_to(view, place.first)
    decided = decisions(run, way)
    for kind in ("left", "condition"):
        for one in decided:
            if one.what == kind:
                return [*line_of_compared(run, one.test, one.line), one.pointed()]
    link = chosen(gone_through(run, way))
    if link is None:
        return lines_that_made(run, place, way[1:])
    note = f"makes {link.name}, from which the loop takes its values"
    note = note if link.name else "chooses what the loop goes over"
    return [PointedLine(link.line, note)] if link.line != place.line else []


def lines_that_made(
    run: RunLines, place: CallSite, callers: Sequence[CodeLine] = ()
) -> list[PointedLine]:
    """The line that made the tensor which a collective was given, or what it was made of."""
    made_at = place.first.made_at
    if made_at is None or made_at == place.line:
        return []
    made = chosen(of_line(run, made_at, callers))
    if made is None or made.line in (made_at, place.line):
        note = f"makes the tensor that line {place.line.number} is given"
        return [PointedLine(made_at, note, True)]
    note = f"gives {made.name}, of which line {made_at.number} is made"
    return [PointedLine(made.line, note, True)]


def lines_that_choose_elements(view: View) -> list[PointedLine]:
    """The line that says which elements the last reduction is given, and this reduction; of several
    such lines the nearest that rounds down.
    """
    for place in view.observed.calls.reductions[-1:]:
        found = choices(run_lines(view, place.ranks[0]), place.line)
        chosen_at = next((one for one in found if one.rounds_down), next(iter(found), None))
        reduction = place.pointed("the last reduction of gradients", chosen_at is None)
        if chosen_at is None or chosen_at.line == place.line:
            return [reduction]
        note = f"says which elements line {place.line.number} is given"
        note = "rounds down how many elements are reduced" if chosen_at.rounds_down else note
        return [PointedLine(chosen_at.line, note, True), reduction]
    return []


def lines_of_no_sync(view: View) -> list[PointedLine]:
    """The line that decided that ``no_sync`` is entered, or else the line that enters it."""
    for place in view.observed.calls.places(Kind.NO_SYNC)[-1:]:
        run, at = run_lines(view, place.ranks[0]), place_at(place.line)
        decision = next(conditions(run, at), None) if at is not None else None
        decided = [] if decision is None else [decision.pointed()]
        return [*decided, place.pointed("no synchronisation inside", is_fault=not decided)]
    return []


def lines_of_divisor(view: View, rank: int, line: CodeLine) -> list[PointedLine]:
    """The line of a function that made the number by which a line divides or multiplies."""
    found = divisors(run_lines(view, rank), line)
    return [
        PointedLine(one.line, f"{one.gives}, which goes into the number at line {line.number}")
        for one in [one for one in found if one.place.function is not None][-1:]
        if one.line != line
    ]


REDUCING = frozenset(
    {"all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor"}
)

MOST_CALLS_UP = 4


class _Unreached(NamedTuple):
    """``place``: of a call that never ran. ``line``: of the call."""

    place: SourceLine
    line: CodeLine


def lines_that_keep_from_reducing(view: View) -> list[PointedLine]:
    """Why a collective that reduces, in the user's code, never ran after the last backward pass.

    Empty if none is there, or if it is not known why it did not run.
    """
    run = run_lines(view)
    for name in REDUCING:
        for one in _never_run(run, name):
            found = _kept_from(run, one, 0)
            if found:
                return found
    return []


def _never_run(run: RunLines, name: str) -> Iterator[_Unreached]:
    """The calls of functions of this name, inside functions of files that ran, that never ran."""
    for file, node in run.nodes():
        if isinstance(node, ast.Call) and called_name(node) == name:
            place = place_of(file, node.lineno)
            if place is not None and place.function and place.line(node) not in run.times:
                yield _Unreached(place, place.line(node))


def _kept_from(run: RunLines, one: _Unreached, up: int) -> list[PointedLine]:
    place = one.place
    assert place.function is not None
    within = run.last_of(place, place.function.body)
    if within <= run.begun:
        if within or up >= MOST_CALLS_UP:
            return []
        callers = _never_run(run, place.function.name)
        found = (_kept_from(run, caller, up + 1) for caller in callers)
        return next(filter(None, found), [])
    for around in reversed(place.around):  # the outermost that did not go on
        node, body = around.statement, getattr(around.statement, around.branch)
        if not isinstance(node, (ast.If, *LOOPS)):
            continue
        if not run.last_of(place, body) and run.count(place, node):
            return _not_gone_on(run, one, node, around.branch)
    return []


def _not_gone_on(run: RunLines, one: _Unreached, node: ast.stmt, branch: str) -> list[PointedLine]:
    """Why a loop or a condition never went on to a call."""
    line, after = one.place.line(node), f"so line {one.line.number} never runs"
    if isinstance(node, (ast.For, ast.AsyncFor)) and branch == "body":
        made = chosen(made_of(run, Origin(one.place, node.iter)))
        lines = []
        if made is not None and made.line != line:
            what = f"makes {made.name}; " if made.name else ""
            note = f"{what}line {line.number} finds nothing in it"
            lines = [PointedLine(made.line, note, True)]
        return [*lines, PointedLine(line, f"goes through nothing, {after}", not lines)]
    if isinstance(node, ast.While):
        return [PointedLine(line, f"the condition is false at once, {after}", True)]
    body = getattr(node, branch)
    if isinstance(node, ast.If) and body[0].lineno != node.lineno:
        truth = "false" if branch == "body" else "true"
        note = f"always {truth}, {after}"
        return [*line_of_compared(run, node.test, line), PointedLine(line, note, True)]
    return []


def backward_count(view: View) -> int:
    """How often the lowest rank that was observed called backward in this step."""
    return sum(call.kind is Kind.BACKWARD for call in view.observed.calls.of_lowest_rank)


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


def lines_of_left_out(view: View, ranks: Sequence[int]) -> Sequence[PointedLine]:
    """Where the gradients of these ranks are cleared, never computed, or reduced without them.

    ``ranks``: those that are left out; () if these are not known.
    """
    calls, absent, who = view.observed.calls, set(ranks), ranks_by_number(ranks)
    if not ranks:
        return ()
    cleared = [
        place
        for place in calls.changes(lambda call: call.clears and call.backwards > 0)
        if set(place.ranks) == absent
    ]
    parting = where_they_part(view, ranks)
    if cleared or set(ranks_without_gradient(view)) >= absent:
        return last_of(cleared, f"clears gradients on {who}") or list(filter(None, [parting]))
    # A group of these ranks alone joins them with no other.
    without = [
        place
        for place in calls.reductions
        if not any(absent & set(group) and set(group) - absent for group in place.groups)
    ]
    groups = {group for place in without[-1:] for group in place.groups}
    made = calls.places(
        Kind.NEW_GROUP,
        where=lambda call: (
            tuple(sorted(call.ranks)) in groups if without else not absent & set(call.ranks)
        ),
    )
    if without or made:
        reduced = last_of(without, f"reduces without {who}", is_fault=not made)
        return [*first_of(made), *reduced]
    if parting is not None:
        return [parting]
    reduced_by_ddp = calls.backwards if view.observed.wrappers else []
    return last_of(
        reduced_by_ddp, f"DDP reduces here; the gradients of {who} are missing in the result"
    )


def ranks_without_gradient(view: View) -> tuple[int, ...]:
    """The ranks whose backward passes were seen to compute nothing but zeros."""
    if view.observed_gradients is None:
        return ()
    computed = view.local_gradients[0]
    return tuple(rank for rank in range(view.world_size) if not bool(computed[rank].any()))


MOST_BEHIND = 4
"""So many lines behind a group are shown in the whole report."""

NEW_GROUPS = ("new_group", "new_subgroups", "new_subgroups_by_enumeration")

OF_THE_GROUP = ("mesh", "device_mesh", "process_group")
"""The arguments that say among which ranks a wrapper reduces."""


def in_small_groups(view: View) -> list[CallSite]:
    """The lines that gave parameters to a wrapper or to FSDP, with a group of only some ranks."""

    def is_small(call: Call) -> bool:
        return bool(call.names) and 0 < len(call.ranks) < view.world_size

    return view.observed.calls_of_all_steps.places(Kind.SHARDING, Kind.WRAP, where=is_small)


def names_in_small_groups(view: View) -> set[str]:
    """The parameters that these lines gave away."""
    places = in_small_groups(view)
    return {name for place in places for name in place.names}


def sharded_names(view: View) -> set[str]:
    """The parameters that were given to FSDP, which reduces their gradients; not those that it was
    told to ignore.
    """
    return _names(view, Kind.SHARDING)


def ignored_by_fsdp(view: View) -> set[str]:
    """The parameters that FSDP was told to ignore."""
    return _names(view, Kind.IGNORE) if _names(view, Kind.SHARDING) else set()


def _names(view: View, kind: Kind) -> set[str]:
    calls = (call for seen in view.observed.by_rank.values() for call in seen.calls)
    return {name for call in calls if call.kind is kind for name in call.names}


def lines_of_sharding(view: View) -> list[PointedLine]:
    """The lines that gave parameters to FSDP, the last one first."""
    return [
        place.pointed(f"{place.first.what} is given {counted(len(place.names), 'parameter')}")
        for place in reversed(view.observed.calls_of_all_steps.places(Kind.SHARDING))
    ]


def groups_of(place: CallSite) -> tuple[tuple[int, ...], ...]:
    """The groups of the calls at this place, on all ranks, each once."""
    return tuple(sorted({one.ranks for calls in place.by_rank.values() for one in calls}))


def lines_of_small_groups(view: View, names: Collection[str] | None = None) -> list[PointedLine]:
    """The lines that gave a wrapper parameters with a group of some ranks, and what made the group.

    ``names``: only of these parameters.
    """
    found: list[PointedLine] = []
    for place in in_small_groups(view):
        given = [name for name in place.names if names is None or name in names]
        if not given:
            continue
        group = given_at(place.line, OF_THE_GROUP)
        run = run_lines(view, place.ranks[0])
        made = set_at(run, group).line if group is not None else place.line
        if made != place.line:
            found.append(PointedLine(made, f"makes the group of line {place.line.number}"))
        note = f"{place.first.what} in {groups_text(groups_of(place))}: {names_text(given)}"
        calls = view.observed.calls_of_all_steps.of(place.ranks[0])
        others = [one for one in calls if one.at == place.line and one not in place.calls]
        led = led_only_to(place.first, others) if others else None
        found += [PointedLine(led, "leads to it with this group", True)] if led else []
        found.append(place.pointed(note, is_fault=led is None))
    return found


def lines_that_gave(
    view: View, places: Sequence[CallSite], names: Sequence[str]
) -> list[PointedLine]:
    """The lines that set an argument with one of these names at each of these places, or that give
    it, where the call goes over several lines.
    """
    found: dict[CodeLine, PointedLine] = {}
    for place in places:
        given = given_at(place.line, names)
        if given is not None:
            line = set_at(run_lines(view, place.ranks[0]), given).line
            if line != place.line:
                found.setdefault(line, PointedLine(line, f"gives {given.name}", True))
    return list(found.values())


def led_only_to(call: Call, others: Collection[Call]) -> CodeLine | None:
    """The nearest line that led to a call, and to none of the others."""
    known = {line for one in others for line in (one.at, *one.callers)}
    return next((line for line in call.callers if line not in known), None)


def lines_that_choose_groups(view: View, places: Sequence[CallSite]) -> list[PointedLine]:
    """The lines that compute the ranks of the groups that were made, or else those that set the
    groups of these collectives.
    """
    made = view.observed.calls_of_all_steps.places(Kind.NEW_GROUP)
    ranks = [one for one in _behind(view, made, ("ranks",), 0, NEW_GROUPS) if one.computes]
    if not ranks:
        return lines_that_set_groups(view, places)
    nearest = min(one.depth for one in ranks)
    chosen = [one.line for one in ranks if one.depth == nearest]
    return [PointedLine(line, "chooses the ranks of a group") for line in chosen[:MOST_BEHIND]]


def lines_that_set_groups(view: View, places: Sequence[CallSite]) -> list[PointedLine]:
    """The lines that set the groups that these collectives are given, the nearest first."""
    given = _behind(view, places, ("group",))
    return [
        PointedLine(one.line, one.gives if one.name else "sets the group")
        for one in given[:MOST_BEHIND]
    ]


def _behind(
    view: View,
    places: Sequence[CallSite],
    names: Sequence[str],
    number: int | None = None,
    called: Collection[str] = (),
) -> list[Origin]:
    """What made the argument with one of these names at each of these places, the nearest first."""
    found, calls = [], {place.line for place in places}
    for place in places:
        given = None if place.line is None else given_at(place.line, names, number, called)
        found += Origins(run_lines(view, place.ranks[0])).all([given] if given else [])
    made = [one for one in found if not isinstance(one.expression, ast.Constant)]
    elsewhere = {one.line: one for one in reversed(made) if one.line not in calls}
    return sorted(elsewhere.values(), key=lambda one: one.depth)


def lines_of_hook_divisors(view: View, hook: CallSite) -> list[PointedLine]:
    """The lines that set what a communication hook multiplies or divides by."""
    begins, run = hook.first.made_at, run_lines(view, hook.ranks[0])
    found: dict[CodeLine, PointedLine] = {}
    for name in divided_by_in(begins) if begins is not None else ():
        given = Origins(run).of_attribute(name)
        if len(given) == 1 and (line := set_at(run, given[0]).line) != hook.line:
            found.setdefault(line, PointedLine(line, f"sets {name}, which the hook scales by"))
    return list(found.values())
