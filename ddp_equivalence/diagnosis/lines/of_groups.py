"""The lines that made groups of ranks, or gave some to a wrapper or a communication hook."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.lines.origins import (
    Link,
    chosen,
    given_to_class,
    lines_that_made,
    links_of,
    set_in_class,
    sole_origin,
)
from ddp_equivalence.diagnosis.lines.source import (
    RunLines,
    SourceLine,
    called_name,
    holds,
    last_name,
    place_at,
    run_lines,
)
from ddp_equivalence.diagnosis.lines.words import counted, names_text
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, StepCalls, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

# The calls that gave parameters to a wrapper whose group has not all ranks, or to FSDP.

OF_THE_GROUP = ("mesh", "device_mesh", "process_group")
"""The arguments that say among which ranks a wrapper reduces."""


def _of_all_steps(view: View) -> StepCalls:
    return StepCalls({rank: seen.calls for rank, seen in view.observed.by_rank.items()})


def in_small_groups(view: View) -> list[CallSite]:
    """The lines that gave parameters to a wrapper or to FSDP, with a group of only some ranks."""

    def is_small(call: Call) -> bool:
        return bool(call.names) and 0 < len(call.ranks) < view.world_size

    return _of_all_steps(view).places(Kind.SHARDING, Kind.WRAP, where=is_small)


def names_in_small_groups(view: View) -> set[str]:
    """The parameters that these lines gave away."""
    return _names(in_small_groups(view))


def sharded_names(view: View) -> set[str]:
    """The parameters that were given to FSDP, which reduces their gradients; not those that it was
    told to ignore.
    """
    return _names(_of_all_steps(view).places(Kind.SHARDING))


def _names(places: Sequence[CallSite]) -> set[str]:
    calls = (call for place in places for of_rank in place.by_rank.values() for call in of_rank)
    return {name for call in calls for name in call.names}


def lines_of_sharding(view: View) -> list[PointedLine]:
    """The lines that gave parameters to FSDP, the last one first."""
    return [
        place.pointed(f"{place.first.what} is given {counted(len(place.names), 'parameter')}")
        for place in reversed(_of_all_steps(view).places(Kind.SHARDING))
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
        run, at = run_lines(view, place.ranks[0]), place_at(place.line)
        for value in _arguments(at, place.line.number, OF_THE_GROUP)[:1]:
            assert at is not None
            origin = sole_origin(run, (at, value))
            lines = lines_that_made(run, (at, value)) if origin is None else [origin]
            made = "" if origin is None else f"makes the group of line {place.line.number}"
            found += [PointedLine(line, made) for line in lines[:1] if line != place.line]
        note = f"{place.first.what} in {groups_text(groups_of(place))}: {names_text(given)}"
        found.append(place.pointed(note, is_fault=True))
    return found


def _arguments(at: SourceLine | None, number: int, names: Sequence[str]) -> list[ast.expr]:
    """What the calls on a line give by keyword for these arguments."""
    calls = [one for one in at.nodes if isinstance(one, ast.Call)] if at is not None else []
    return [
        keyword.value
        for call in calls
        if holds(call, number)
        for keyword in call.keywords
        if keyword.arg in names
    ]


# The lines that made the numbers by which a communication hook decides what it reduces.

MOST_NUMBERS = 2
MOST_LINES = 3


def hooks_of_all_steps(view: View) -> list[CallSite]:
    """The lines that gave DDP a communication hook, in this step or before."""
    return _of_all_steps(view).places(Kind.HOOK)


def lines_of_hook_state(view: View) -> list[PointedLine]:
    """The lines that made the numbers which conditions of the last hook ask, and the line that gave
    DDP this hook; at most three, and [] if the step made no such number.
    """
    for place in hooks_of_all_steps(view)[-1:]:
        call, run = place.first, run_lines(view, place.ranks[0])
        by_number = {
            f"{name}={value:g}": _lines_of_number(run, call, name, f"{name}={value:g}")
            for name, value in call.numbers
        }
        held = [shown for shown, lines in by_number.items() if lines]
        made = [one for lines in by_number.values() for one in lines if one.line != place.line]
        if held:
            made.sort(key=lambda one: not one.is_fault)
            others = {one.line: one for one in reversed(made)}
            gets = place.pointed(f"{call.what} gets {' and '.join(held[:MOST_NUMBERS])}")
            return [*list(others.values())[::-1][: MOST_LINES - 1], gets]
    return []


def _lines_of_number(run: RunLines, call: Call, name: str, shown: str) -> list[PointedLine]:
    """The lines that made what the state of a hook holds under this name."""
    state = call.hook_state
    if state is None or name not in state.asked:
        return []
    given = [*given_to_class(run, state.kind, state.arguments, name)]
    given = given or set_in_class(run, state.kind, name)
    if len(given) != 1:
        return []
    at, lines = sole_origin(run, given[0]), lines_that_made(run, given[0])
    if at is None:
        return [PointedLine(line, "", True) for line in lines[:1]]
    note = f"gives {shown}, which {call.what} asks"
    return [PointedLine(at, note, True), *(PointedLine(one) for one in lines if one != at)]


# The lines that computed which ranks a process group is made of.

GIVEN = {
    "new_group": ("ranks", 0),
    "new_subgroups": ("group_size", 0),
    "new_subgroups_by_enumeration": ("ranks_per_subgroup_list", 0),
    "init_device_mesh": ("mesh_shape", 1),
    "DeviceMesh": ("mesh", 1),
}
"""The functions that make groups -> the argument that says of which ranks: its name and place."""

MOST_ORIGINS = 2


def with_origins_of_groups(view: View, lines: Sequence[PointedLine]) -> list[PointedLine]:
    """The lines, and beside the first one that makes groups those that computed their ranks."""
    known = {one.line for one in lines}
    for number, one in enumerate(lines):
        told = f"; line {one.line.number} {one.note}" if one.note else ""
        origins = [
            replace(origin, note=origin.note + told)
            for origin in _origins(view, one.line)
            if origin.line not in known
        ][:MOST_ORIGINS]
        if origins:
            pair = [one, *origins]
            if any(origin.is_fault for origin in origins):
                pair = [*origins, replace(one, is_fault=False)]
            return [*lines[:number], *pair, *lines[number + 1 :]]
    return list(lines)


def _origins(view: View, line: CodeLine) -> list[PointedLine]:
    """The lines that computed the ranks of the groups that this line has made."""
    run = run_lines(view)
    found: dict[CodeLine, list[tuple[int, ...]]] = {}
    computing: set[CodeLine] = set()
    for call in _made_at(view, line):
        link = _origin(run, call)
        if link is not None and link.line != line:
            found.setdefault(link.line, []).append(tuple(call.ranks))
            if link.selects or _computes(link):
                computing.add(link.line)
    groups_of_line = {origin: tuple(sorted(set(ranks))) for origin, ranks in found.items()}
    shown = []
    for origin, groups in groups_of_line.items():
        alike = [one for one, others in groups_of_line.items() if others == groups]
        again = f", as line {alike[0].number} does" if origin != alike[0] else ""
        # Of lines that make the same groups, the first one may well be right.
        is_fault = origin in computing and (origin != alike[0] or len(alike) == 1)
        shown.append(PointedLine(origin, f"makes {groups_text(groups)}{again}", is_fault))
    return sorted(shown, key=lambda one: not one.is_fault)


def _made_at(view: View, line: CodeLine) -> Iterator[Call]:
    """The groups that a line has made; those in which gradients were reduced, if it made some."""
    used = {
        frozenset(call.collective.ranks)
        for seen in view.observed.by_rank.values()
        for call in seen.calls
        if call.collective is not None and reduces_gradients(call)
    }
    for place in _of_all_steps(view).places(Kind.NEW_GROUP):
        if place.line == line:
            in_use = [call for call in place.calls if frozenset(call.ranks) in used]
            yield from in_use or place.calls


def _origin(run: RunLines, call: Call) -> Link | None:
    """The line that computed the ranks of a group, or else where they come from."""
    line = call.users_line or call.line
    place = place_at(line) if line is not None else None
    given = _given(place) if place is not None else None
    if line is None or place is None or given is None:
        return None
    callers = [one for one in call.callers if (one.file, one.number) != (line.file, line.number)]
    links = links_of(run, place, given, callers)
    return next((one for one in links if one.selects or _computes(one)), chosen(links))


def _computes(link: Link) -> bool:
    """True if the line computes the value that it names, and does not only pass it on."""
    place = place_at(link.line)
    statement = place.statement if place is not None else None
    if not isinstance(statement, ast.Assign) or last_name(statement.targets[0]) != link.name:
        return False
    computing = (ast.BinOp, ast.Compare, ast.ListComp)
    return any(isinstance(node, computing) for node in ast.walk(statement))


def _given(place: SourceLine) -> ast.expr | None:
    """The expression that says of which ranks the groups are to be."""
    for node in place.nodes:
        if isinstance(node, ast.Call) and called_name(node) in GIVEN:
            argument, at = GIVEN[called_name(node)]
            named = [one.value for one in node.keywords if one.arg == argument]
            return next(iter(named or node.args[at : at + 1]), None)
    return None
