"""The lines that decided whether, how often, and on which ranks a line of the user's code ran."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.origins import Origin, Origins
from ddp_equivalence.diagnosis.lines.source import RunLines, SourceLine, leaving, place_at
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine

What = Literal["left", "condition"]


@dataclass(frozen=True)
class Decision:
    """``line`` left a loop, or is a condition that chose a branch.

    ``note``: what was seen of it, as a clause. ``chosen``: a condition chose this branch so often,
    of ``times``. ``test``: the condition itself.
    """

    line: CodeLine
    what: What
    note: str
    chosen: int = 0
    times: int = 0
    test: ast.expr | None = None

    def pointed(self, is_fault: bool = True) -> PointedLine:
        """The line, to be shown in a report."""
        return PointedLine(self.line, self.note, is_fault)


def decisions(run: RunLines, way: Sequence[CodeLine]) -> list[Decision]:
    """What decided that a line ran, the nearest first.

    ``way``: the line, and the lines that led to it, the innermost first. Conditions that were the
    same each time have decided nothing.
    """
    found: list[Decision] = []
    for line in way:
        place = place_at(line)
        if place is not None and place.function is not None:
            found += [one for one in conditions(run, place) if one.chosen < one.times]
            found += _ways_out(run, place)
    return found


def conditions(run: RunLines, place: SourceLine) -> Iterator[Decision]:
    """The conditions of this function around a line, the innermost first."""
    for one in place.around:
        if isinstance(one.statement, ast.If):
            decision = _condition(run, place, one.statement, one.branch)
            if decision is not None:
                yield decision


def _condition(run: RunLines, place: SourceLine, node: ast.If, branch: str) -> Decision | None:
    body, other = (node.body, node.orelse) if branch == "body" else (node.orelse, node.body)
    if body[0].lineno == node.lineno or not run.count(place, node):
        return None
    times, chosen = run.exact_count(place, node), run.times_begun(place, body)
    if times is not None and other and (chosen is None or isinstance(body[0], ast.If)):
        others = run.times_begun(place, other)
        chosen = None if others is None else times - others
    is_true = branch == "body"
    seen = f"decides whether line {place.statement.lineno} runs"
    if times is not None and chosen is not None:
        seen = f"{'true' if is_true else 'false'} {chosen} of {times} times"
    else:
        times = chosen = 0
    test: ast.expr = node.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_true = test.operand, not is_true
    set_by = Origins(run).of(Origin(place, test)) if isinstance(test, ast.Name) else []
    if (
        isinstance(test, ast.Name)
        and len(set_by) == 1
        and set_by[0].place.value is set_by[0].expression
    ):
        if times:
            seen = f"{test.id} is {'true' if is_true else 'false'} {chosen} of {times} times"
        return Decision(set_by[0].line, "condition", seen, chosen, times)
    return Decision(place.line(node), "condition", seen, chosen, times, node.test)


def _ways_out(run: RunLines, place: SourceLine) -> Iterator[Decision]:
    """The statements that left the loops around a line."""
    for loop in place.loops:
        for node in leaving(loop):
            if run.count(place, node):
                word = "returns" if isinstance(node, ast.Return) else "breaks"
                note = f"{word} from inside the loop of line {loop.lineno}"
                yield Decision(place.line(node), "left", note)


def meeting_lines(first: Call, second: Call) -> tuple[CodeLine, CodeLine] | None:
    """The lines of the innermost function that made both calls, itself or by other functions.

    None if it made both with one line, or if the ways to the calls are not known.
    """
    for here in _way(first):
        for there in _way(second):
            if (here.file, here.function) == (there.file, there.function):
                return None if here.number == there.number else (here, there)
    return None


def at_meeting(
    first: PointedLine | None, second: PointedLine | None, one: Call, other: Call
) -> list[PointedLine]:
    """Two lines of helpers, after the lines of their common caller, which get their marks.

    ``one`` and ``other``: the calls that the lines made, in this order. Only the two lines, if they
    stand in one function already, or if the ways to the calls are not known.
    """
    both = [line for line in (first, second) if line is not None]
    met = meeting_lines(one, other)
    if met is None or len(both) < 2:
        return both
    shown = []
    for line, pointed in zip(met, both, strict=True):
        is_inside = line.number != pointed.line.number or line.file != pointed.line.file
        where = f"in line {pointed.line.number}" if is_inside else ""
        note = ", ".join(filter(None, (pointed.note, where)))
        shown.append(replace(pointed, line=line, note=note))
    known = {(line.file, line.number) for line in met}
    rest = [
        replace(pointed, is_fault=False, missing="")
        for pointed in sorted(both, key=lambda pointed: not pointed.is_fault)
        if (pointed.line.file, pointed.line.number) not in known
    ]
    return [*shown, *rest[:1]]


def _way(call: Call) -> tuple[CodeLine, ...]:
    line = call.at
    return () if line is None else (line, *call.callers)


def where_they_part(view: View, ranks: Sequence[int]) -> PointedLine | None:
    """The first line that only these ranks ran, or the last one before they left the others' way.

    None if their lines do not tell them from all others.
    """
    run_by = {rank: set(lines) for rank, lines in view.observed.lines_run.items()}
    here = [run_by[rank] for rank in ranks if rank in run_by]
    others = [rank for rank in run_by if rank not in ranks]
    there = [run_by[rank] for rank in others]
    if not there or len(here) < len(ranks):
        return None
    who, known = ranks_by_number(ranks), set.intersection(*here)
    alone = known - set[CodeLine]().union(*there)
    for line in view.observed.lines_run[ranks[0]]:
        if line in alone:
            return PointedLine(line, f"only {who} came here", is_fault=True)
    missed = set.intersection(*there) - set[CodeLine]().union(*here)
    for before, line in pairwise(view.observed.lines_run[others[0]]):
        if line in missed and before in known:
            return PointedLine(before, f"{who} did not go on from here", is_fault=True)
    return None
