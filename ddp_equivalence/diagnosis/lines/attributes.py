"""The lines that set an attribute of an object."""

from __future__ import annotations

import ast

from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import called_name, place_of, tree_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import CodeLine


def lines_that_set_attribute(run: RunLines, name: str) -> list[CodeLine]:
    """The line that has run and set an attribute of this name, or gave it to a constructor.

    Empty if several different lines did.
    """
    found: dict[CodeLine, None] = {}
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            line = _line_if_sets(file, node, name)
            if line is not None and run.times.get(line):
                found[line] = None
    return list(found) if len(found) == 1 else []


def lines_in_class_that_set(run: RunLines, name: str, line: CodeLine) -> list[CodeLine]:
    """The lines that have run and set an attribute of this name in the class of this line, before
    this line ran last.
    """
    tree = tree_of(line.file)
    found: dict[CodeLine, None] = {}
    for one in ast.walk(tree) if tree is not None else ():
        end = getattr(one, "end_lineno", None) or 0
        if not isinstance(one, ast.ClassDef) or not one.lineno <= line.number <= end:
            continue
        for node in ast.walk(one):
            setter = _line_if_sets(line.file, node, name)
            if setter is not None and 0 < run.last.get(setter, 0) < run.last.get(line, 0):
                found[setter] = None
    return list(found)


def _line_if_sets(file: str, node: ast.AST, name: str) -> CodeLine | None:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target] if node.value is not None else []
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            called = called_name(node)
            if keyword.arg == name and (called[:1].isupper() or called == "cls"):
                return line_in_function(file, keyword.value.lineno)
        return None
    else:
        return None
    for target in targets:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if any(isinstance(one, ast.Attribute) and one.attr == name for one in parts):
            return line_in_function(file, target.lineno)
    return None


def line_in_function(file: str, number: int) -> CodeLine | None:
    """The line with the name of the function that it stands in; None if the file is not read."""
    place = place_of(file, number)
    if place is None:
        return None
    name = place.function.name if place.function is not None else "<module>"
    return CodeLine(file, number, name)


def line_of_compared(run: RunLines, test: ast.expr | None, at: CodeLine) -> list[PointedLine]:
    """The only line that set an attribute which a condition compares; [] if there are several.

    Of an attribute that is set to another one and counted from there, it is the line of the other.
    """
    for node in ast.walk(test) if isinstance(test, ast.Compare) else ():
        if isinstance(node, ast.Attribute):
            for line in lines_that_set_attribute(run, node.attr):
                return [PointedLine(line, f"sets {node.attr}, which line {at.number} compares")]
            for line, name in _begins_with(run, node.attr):
                note = f"sets {name}; {node.attr} begins with it, which line {at.number} compares"
                return [PointedLine(line, note)]
    return []


def _begins_with(run: RunLines, name: str) -> list[tuple[CodeLine, str]]:
    """The line that set the attribute to which an attribute of this name is set before it is
    counted up or down, and the name of this attribute; [] if it is not set like this.
    """
    copied: set[str] = set()
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            line = _line_if_sets(file, node, name)
            if line is None or not run.times.get(line) or isinstance(node, ast.AugAssign):
                continue
            value = getattr(node, "value", None)
            copied.add(value.attr if isinstance(value, ast.Attribute) else "")
    source = copied.pop() if len(copied) == 1 else ""
    return [(line, source) for line in lines_that_set_attribute(run, source)] if source else []
