"""The lines that decided whether, and how often, a line of the user's code ran."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import (
    LOOPS,
    Place,
    inside,
    leaving,
    loops_around,
    place_of,
    skipping,
)
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import CodeLine

What = Literal["left", "skipped", "condition"]


@dataclass(frozen=True)
class Decision:
    """``line`` left a loop, went on with its next pass, or is a condition that chose a branch.

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
        place = place_of(line.file, line.number)
        if place is not None and place.function is not None:
            place = run.beside_backward(place)
            found += [one for one in conditions(run, place) if one.chosen < one.times]
            found += _ways_out(run, place)
    return found


def conditions(run: RunLines, place: Place) -> Iterator[Decision]:
    """The conditions of this function around a line, the innermost first."""
    for one in place.around:
        if isinstance(one.statement, ast.If):
            decision = _condition(run, place, one.statement, one.branch)
            if decision is not None:
                yield decision


def _condition(run: RunLines, place: Place, node: ast.If, branch: str) -> Decision | None:
    body, other = node.body, node.orelse
    if branch != "body":
        body, other = other, body
    if body[0].lineno == node.lineno or not run.count(place, node):
        return None
    times, chosen = run.exact_count(place, node), run.times_begun(place, body)
    if times is not None and other and (chosen is None or isinstance(body[0], ast.If)):
        others = run.times_begun(place, other)
        chosen = None if others is None else times - others
    name, is_not = _name_of(node.test)
    line, seen = place.line(node), f"decides whether line {place.statement.lineno} runs"
    if times is not None and chosen is not None:
        seen = f"{'true' if branch == 'body' else 'false'} {chosen} of {times} times"
    else:
        times = chosen = 0
    set_at = _only_line_that_sets(run, place, name) if name else None
    if set_at is not None:
        if times:
            truth = "true" if (branch == "body") != is_not else "false"
            seen = f"{name} is {truth} {chosen} of {times} times"
        return Decision(set_at, "condition", seen, chosen, times)
    return Decision(line, "condition", seen, chosen, times, node.test)


def _name_of(test: ast.expr) -> tuple[str, bool]:
    """The variable that is a condition, and whether the condition is its contrary."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        name, is_not = _name_of(test.operand)
        return name, not is_not
    return (test.id, False) if isinstance(test, ast.Name) else ("", False)


def _only_line_that_sets(run: RunLines, place: Place, name: str) -> CodeLine | None:
    lines = lines_that_set_variable(run, place, name)
    return lines[0] if len(lines) == 1 else None


def lines_that_set_variable(run: RunLines, place: Place, name: str) -> list[CodeLine]:
    """The lines of this function that have run and set a variable of this name."""
    found: dict[CodeLine, None] = {}
    for node in inside(place.function) if place.function is not None else ():
        if isinstance(node, ast.stmt) and name in _names_set(node):
            line = place.line(node)
            if run.times.get(line):
                found[line] = None
    return list(found)


def _names_set(node: ast.stmt) -> set[str]:
    """The variables that a statement sets, without those that the statements inside it set."""
    parts: list[ast.expr | None] = []
    if isinstance(node, ast.Assign):
        parts = [*node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        parts = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        parts = [one.optional_vars for one in node.items]
    return {
        one.id
        for part in parts
        if part is not None
        for one in ast.walk(part)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }


def _ways_out(run: RunLines, place: Place) -> Iterator[Decision]:
    """The statements that left the loops around a line, or skipped the rest of a pass."""
    for loop in loops_around(place):
        for node in leaving(loop):
            if run.count(place, node) and not _is_on_one_line(loop, node):
                word = "returns" if isinstance(node, ast.Return) else "breaks"
                passes = run.exact_count(place, loop)
                begun = _beginnings(run, place)
                seen = f", in pass {passes} of it" if begun == 1 and passes else ""
                note = f"{word} from inside the loop of line {loop.lineno}{seen}"
                yield Decision(place.line(node), "left", note)
        for node in skipping(loop):
            times = run.exact_count(place, node)
            if times and node.lineno < place.statement.lineno:
                passed = "a pass" if times == 1 else f"{times} passes"
                yield Decision(place.line(node), "skipped", f"ends {passed} of the loop here")


def _is_on_one_line(loop: ast.stmt, node: ast.stmt) -> bool:
    """True if a condition stands on the line of the statement, which may then not have run."""
    return any(
        isinstance(parent, ast.stmt) and parent.lineno == node.lineno
        for parent in ast.walk(loop)
        if any(child is node for child in ast.iter_child_nodes(parent))
    )


def _beginnings(run: RunLines, place: Place) -> int:
    """How often the function of this place began, as far as its first line shows; 0 if unknown."""
    if place.function is None:
        return 0
    body = [
        one
        for one in place.function.body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    ]
    if body and isinstance(body[0], LOOPS):
        return 1 if run.exact_count(place, body[0]) == 1 else 0
    return run.times_begun(place, body) or 0
