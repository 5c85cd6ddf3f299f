"""The lines that put the tensors of a collective into the list that its loop goes through."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.lines.attributes import line_in_function
from ddp_equivalence.diagnosis.lines.lines_around_reduction import way_to
from ddp_equivalence.diagnosis.lines.run_lines import RunLines, run_lines
from ddp_equivalence.diagnosis.lines.source_tree import loops_around, place_of, tree_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine

PUTTING = frozenset({"append", "add", "extend", "update", "insert", "appendleft"})


def lines_that_put_into(view: View, place: Place) -> list[PointedLine]:
    """The condition under which things are put into what the loop around a collective goes through.

    Without a condition, the line that puts them there. Empty if several lines do.
    """
    run = run_lines(view, place.ranks[0])
    for line in way_to(view, place.first):
        at = place_of(line.file, line.number)
        for loop in loops_around(at) if at is not None else ():
            name = None if isinstance(loop, ast.While) else _name(loop.iter)
            found = _putting(run, name) if name else []
            return _pointed(run, name or "", found[0]) if len(found) == 1 else []
    return []


def _name(expression: ast.expr) -> str | None:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else None


def _putting(run: RunLines, name: str) -> list[CodeLine]:
    """The lines that have run and put something into a list, set or attribute of this name."""
    found: dict[CodeLine, None] = {}
    for file in run.files:
        for node in _calls(file):
            function = node.func
            if not isinstance(function, ast.Attribute) or function.attr not in PUTTING:
                continue
            line = line_in_function(file, node.lineno)
            if _name(function.value) == name and line is not None and run.times.get(line):
                found[line] = None
    return list(found)


def _calls(file: str) -> Iterator[ast.Call]:
    tree = tree_of(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call):
            yield node


def _pointed(run: RunLines, name: str, line: CodeLine) -> list[PointedLine]:
    place = place_of(line.file, line.number)
    assert place is not None
    for around in place.around:
        if isinstance(around.statement, ast.If):
            times = run.times.get(line, 0)
            note = f"let line {line.number} put something into {name} {times} times"
            return [PointedLine(place.line(around.statement), note, True)]
    times = run.times.get(line, 0)
    return [PointedLine(line, f"puts something into {name}; it ran {times} times", True)]
