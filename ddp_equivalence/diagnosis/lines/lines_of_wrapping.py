"""The calls that gave some parameters to a wrapper whose group has not all ranks."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ddp_equivalence.diagnosis.lines.origins import Link, chosen, line_of_compared, links_of
from ddp_equivalence.diagnosis.lines.source_tree import (
    LOOPS,
    Function,
    RunLines,
    SourceLine,
    called_name,
    inside,
    place_of,
    run_lines,
    tree_of,
)
from ddp_equivalence.diagnosis.lines.sources import (
    argument_of_line,
    given_to_class,
    lines_that_made,
    set_in_class,
    sole_origin,
)
from ddp_equivalence.diagnosis.lines.words import counted, names_text
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, StepCalls
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

OF_THE_GROUP = ("mesh", "device_mesh", "process_group")
"""The arguments that say among which ranks a wrapper reduces."""


def in_small_groups(view: View) -> list[CallSite]:
    """The lines that gave parameters to a wrapper or to FSDP, with a group of only some ranks."""

    def is_small(call: Call) -> bool:
        return bool(call.names) and 0 < len(call.ranks) < view.world_size

    return _of_all_steps(view).places(Kind.SHARDING, Kind.WRAP, where=is_small)


def sharded_names(view: View) -> set[str]:
    """The parameters that were given to FSDP, which reduces their gradients; not those that it was
    told to ignore.
    """
    places = _of_all_steps(view).places(Kind.SHARDING, where=lambda call: bool(call.names))
    return {
        name
        for place in places
        for calls in place.by_rank.values()
        for call in calls
        for name in call.names
    }


def lines_of_sharding(view: View) -> list[PointedLine]:
    """The lines that gave parameters to FSDP, the last one first."""
    places = _of_all_steps(view).places(Kind.SHARDING)
    return [
        place.pointed(f"{place.first.what} is given {counted(len(place.names), 'parameter')}")
        for place in reversed(places)
    ]


def _of_all_steps(view: View) -> StepCalls:
    return StepCalls({rank: seen.calls for rank, seen in view.observed.by_rank.items()})


def groups_of(place: CallSite) -> tuple[tuple[int, ...], ...]:
    """The groups of the calls at this place, on all ranks, each once."""
    return tuple(sorted({one.ranks for calls in place.by_rank.values() for one in calls}))


def names_in_small_groups(view: View) -> set[str]:
    """The parameters that these lines gave away."""
    return {
        name
        for place in in_small_groups(view)
        for calls in place.by_rank.values()
        for call in calls
        for name in call.names
    }


def lines_of_small_groups(view: View, names: Collection[str] | None = None) -> list[PointedLine]:
    """The lines that gave a wrapper parameters with a group of some ranks, and what made the group.

    ``names``: only of these parameters.
    """
    found: list[PointedLine] = []
    for place in in_small_groups(view):
        given = [name for name in place.names if names is None or name in names]
        if not given:
            continue
        run = run_lines(view, place.ranks[0])
        for bound in argument_of_line(place.line, OF_THE_GROUP)[:1]:
            origin = sole_origin(run, bound)
            lines = lines_that_made(run, bound) if origin is None else [origin[0].line(origin[1])]
            made = "" if origin is None else f"makes the group of line {place.line.number}"
            found += [PointedLine(line, made) for line in lines[:1] if line != place.line]
        note = f"{place.first.what} in {groups_text(groups_of(place))}: {names_text(given)}"
        found.append(place.pointed(note, is_fault=True))
    return found


# The lines that made the numbers by which a communication hook decides what it reduces.

MOST_NUMBERS = 2
MOST_LINES = 3


def hooks_of_all_steps(view: View) -> list[CallSite]:
    """The lines that gave DDP a communication hook, in this step or before."""
    of_all = StepCalls({rank: seen.calls for rank, seen in view.observed.by_rank.items()})
    return of_all.places(Kind.HOOK)


def lines_of_hook_state(view: View) -> list[PointedLine]:
    """The lines that made the numbers which conditions of the last hook ask, and the line that gave
    DDP this hook; at most three, and [] if the step made no such number.
    """
    for place in hooks_of_all_steps(view)[-1:]:
        call, run = place.first, run_lines(view, place.ranks[0])
        made: list[PointedLine] = []
        held: list[str] = []
        for name, value in call.numbers:
            lines = _lines_of_number(run, call, name, f"{name}={value:g}")
            if lines:
                held.append(f"{name}={value:g}")
                made += lines
        if made:
            gets = place.pointed(f"{call.what} gets {' and '.join(held[:MOST_NUMBERS])}")
            others = [one for one in distinct_lines(made) if one.line != place.line]
            return [*others[: MOST_LINES - 1], gets]
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
    origin = sole_origin(run, given[0])
    lines = lines_that_made(run, given[0])
    if origin is None:
        return [PointedLine(line, "", True) for line in lines[:1]]
    at = origin[0].line(origin[1])
    note = f"gives {shown}, which {call.what} asks"
    return [PointedLine(at, note, True), *(PointedLine(one) for one in lines if one != at)]


def distinct_lines(pointed: list[PointedLine]) -> list[PointedLine]:
    """Each line once, those that are at fault first."""
    ordered = sorted(pointed, key=lambda one: not one.is_fault)
    return list({one.line: one for one in reversed(ordered)}.values())[::-1]


# Collectives in the user's code that never ran, and what kept them from running.

REDUCING = frozenset(
    {"all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor"}
)

MOST_CALLS_UP = 4


@dataclass(frozen=True)
class Unreached:
    """``place``: of a call that never ran. ``line``: of the call."""

    place: SourceLine
    line: CodeLine


def lines_that_keep_from_reducing(view: View) -> list[PointedLine]:
    """Why a collective that reduces, in the user's code, never ran after the last backward pass.

    Empty if none is there, or if it is not known why it did not run.
    """
    rank = min(view.observed.by_rank, default=0)
    run = run_lines(view, rank)
    begun = max(
        (
            run.last.get(call.users_line, 0)
            for call in view.observed.calls.of(rank)
            if call.kind is Kind.BACKWARD and call.users_line is not None
        ),
        default=0,
    )
    for name in REDUCING:
        for one in _never_run(run, {name}):
            found = _kept_from(run, one, begun, 0)
            if found:
                return found
    return []


def _never_run(run: RunLines, names: set[str]) -> Iterator[Unreached]:
    """The calls of functions of these names that never ran, in files that did."""
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Call) or called_name(node) not in names:
                continue
            place = place_of(file, node.lineno)
            if place is not None and place.function is not None:
                line = place.line(node)
                if line not in run.times:
                    yield Unreached(place, line)


def _kept_from(run: RunLines, one: Unreached, begun: int, up: int) -> list[PointedLine]:
    place = one.place
    assert place.function is not None
    if run.last_of(place.file, place.function) <= begun:
        if run.has_run(place.file, place.function) or up >= MOST_CALLS_UP:
            return []
        for caller in _never_run(run, {place.function.name}):
            found = _kept_from(run, caller, begun, up + 1)
            if found:
                return found
        return []
    for around in reversed(place.around):  # the outermost that did not go on
        node, body = around.statement, getattr(around.statement, around.branch)
        if not isinstance(node, (ast.If, *LOOPS)):
            continue
        if run.has_begun(place, body) or not run.count(place, node):
            continue
        line = place.line(node)
        after = f"so line {one.line.number} never runs"
        if isinstance(node, (ast.For, ast.AsyncFor)) and around.branch == "body":
            made = chosen(links_of(run, place, node.iter))
            known = made is not None and made.line != line
            return [
                *([_made(made, line)] if made is not None and known else []),
                PointedLine(line, f"goes through nothing, {after}", not known),
            ]
        if isinstance(node, ast.While):
            return [PointedLine(line, f"the condition is false at once, {after}", True)]
        if isinstance(node, ast.If) and body[0].lineno != node.lineno:
            truth = "false" if around.branch == "body" else "true"
            return [
                *line_of_compared(run, node.test, line),
                PointedLine(line, f"always {truth}, {after}", True),
            ]
        return []
    returned = _returned_before(run, place, place.function)
    if returned is None:
        return []
    return [PointedLine(returned, f"returns before line {one.line.number}", True)]


def _made(link: Link, loop: CodeLine) -> PointedLine:
    what = f"makes {link.name}; " if link.name else ""
    return PointedLine(link.line, f"{what}line {loop.number} finds nothing in it", True)


def _returned_before(run: RunLines, place: SourceLine, function: Function) -> CodeLine | None:
    """The statement before a line that has returned from its function."""
    for node in inside(function):
        if isinstance(node, ast.Return) and node.lineno < place.statement.lineno:
            above = place_of(place.file, node.lineno)
            alone = above is not None and above.statement is node
            if alone and run.count(place, node):
                return place.line(node)
    return None


def lines_that_return_before(view: View, function: str) -> list[PointedLine]:
    """A ``return`` that ran after backward began, above a call of this function."""
    rank = min(view.observed.by_rank, default=0)
    run = run_lines(view, rank)
    begun = max((run.last.get(at, 0) for at in run.backwards), default=0)
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Call) or called_name(node) != function:
                continue
            place = place_of(file, node.lineno)
            found = _returned_above(run, place, begun) if place is not None else None
            if found is not None:
                times = "once" if run.times[found] == 1 else f"{run.times[found]} times"
                note = f"returned {times}, before line {node.lineno} calls {function}()"
                return [PointedLine(found, note, True)]
    return []


def _returned_above(run: RunLines, place: SourceLine, begun: int) -> CodeLine | None:
    for node in inside(place.function) if place.function is not None else ():
        line = place.line(node)
        is_above = isinstance(node, ast.Return) and line.number < place.statement.lineno
        if is_above and run.last.get(line, 0) > begun:
            return line
    return None
