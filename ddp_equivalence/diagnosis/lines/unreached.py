"""Collectives in the user's code that never ran, and what kept them from running."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ddp_equivalence.diagnosis.lines.attributes import line_of_compared
from ddp_equivalence.diagnosis.lines.origins import Link, chosen, links_of
from ddp_equivalence.diagnosis.lines.run_lines import RunLines, run_lines
from ddp_equivalence.diagnosis.lines.source_tree import (
    LOOPS,
    Function,
    Place,
    called_name,
    inside,
    place_of,
    tree_of,
)
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine, Kind

REDUCING = frozenset(
    {"all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor"}
)

MOST_CALLS_UP = 4


@dataclass(frozen=True)
class Unreached:
    """``place``: of a call that never ran. ``line``: of the call."""

    place: Place
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


def _returned_before(run: RunLines, place: Place, function: Function) -> CodeLine | None:
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


def _returned_above(run: RunLines, place: Place, begun: int) -> CodeLine | None:
    for node in inside(place.function) if place.function is not None else ():
        line = place.line(node)
        is_above = isinstance(node, ast.Return) and line.number < place.statement.lineno
        if is_above and run.last.get(line, 0) > begun:
            return line
    return None
