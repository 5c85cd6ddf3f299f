"""The lines that set what a line reads, or passed it on, the nearest first."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

from torch import Tensor

from ddp_equivalence.diagnosis.lines.origins import (
    OF_A_MODULE,
    SEEDING,
    Origin,
    Origins,
    in_head,
)
from ddp_equivalence.diagnosis.lines.source import (
    RunLines,
    SourceLine,
    called_name,
    classes_in,
    place_at,
    sets_constant,
)
from ddp_equivalence.diagnosis.setting import PointedLine, Reading
from ddp_equivalence.measurement.calls import CodeLine

DEEPEST = 2
"""How many lines are followed, one behind the other."""


def lines_behind(
    run: RunLines,
    line: CodeLine,
    most: int,
    is_right: Callable[[Reading], bool] = lambda reading: False,
) -> list[PointedLine]:
    """At most so many lines that have run and set what this line reads, the nearest first.

    ``is_right``: whether what a line reads is known to be right.
    """
    found: dict[CodeLine, PointedLine] = {}
    level: list[tuple[CodeLine, ast.expr | None]] = [(line, None)]
    for _ in range(DEEPEST):
        before: list[tuple[CodeLine, ast.expr | None]] = []
        for reader, part in level:
            for verb, name, setter, given, read in _setters(run, reader, part):
                reading = Reading(read, reader, verb == "passes")
                if is_right(reading):
                    continue
                note = f"{verb} {name}, which line {reader.number} reads"
                if setter != line:
                    found.setdefault(setter, PointedLine(setter, note, reads=reading))
                returning = lines_that_return(run, setter) if verb == "sets" else ()
                before += [(setter, given), *((one, None) for one in returning)]
        level = before
    # A constant is the same on all ranks, so what else is read tells more.
    return sorted(found.values(), key=lambda one: sets_constant(one.line))[:most]


def lines_that_return(run: RunLines, line: CodeLine) -> list[CodeLine]:
    """The lines that have run and returned what a line assigns, if it calls a user's functions."""
    place, origins = place_at(line), Origins(run)
    if place is None:
        return []
    calls = [one for one in in_head(place.statement) if isinstance(one, ast.Call)]
    if isinstance(place.statement, ast.Assign):  # a call of a class only makes an object here
        calls = [one for one in calls if called_name(one) not in _classes(run)]
    return [one.line for call in calls for one in origins.of_call(call)]


def _setters(
    run: RunLines, line: CodeLine, part: ast.expr | None
) -> Iterator[tuple[str, str, CodeLine, ast.expr | None, str]]:
    """What a line, or this part of it, reads, which line "sets" it, or "passes" it, as which of
    its expressions, and as what it is read. Attributes come first, since they are set far away.
    """
    place, origins = place_at(line), Origins(run)
    if place is None:
        return
    nodes = list(in_head(place.statement))
    called = {id(one.func) for one in nodes if isinstance(one, ast.Call)}
    owners = {id(one.value) for one in nodes if id(one) not in called and _gives_no_values(one)}
    sizes = [one for one in nodes if called_name(one) in ("len", "size", "numel")]
    owners |= {id(part) for one in sizes for part in ast.walk(one)}
    if line.number > place.statement.lineno:  # of a statement of several lines
        begin = (one for one in nodes if getattr(one, "lineno", 0) == line.number)
        nodes = [node for one in begin for node in ast.walk(one)] or nodes
    nodes = nodes if part is None else list(ast.walk(part))
    read = [one for one in nodes if isinstance(getattr(one, "ctx", None), ast.Load)]
    read = [one for one in read if id(one) not in owners]
    for node in read:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            given = origins.of(Origin(place, node))
            given = [one for one in given if not one.fills and not _gives_nothing(one)]
            one = _in_force(run, line, node, given)
            far = None if one is None else _far_away(origins, node.attr, one)
            if far is not None and (far[0] == "sets" or id(node) not in called):
                yield (*far, None, ast.unparse(node))
    for node in read:
        if isinstance(node, ast.Name):
            given = [one for one in origins.of(Origin(place, node)) if not _gives_nothing(one)]
            own = [one for one in given if one.place.function is place.function]
            passed = given if len(given) == 1 and not own and id(node) not in called else []
            before = [one for one in own if one.line.number < line.number and not _seeds(one)]
            last = max(before, key=lambda one: one.line.number, default=None)
            if last is not None and not _is_leaf(last):
                yield "adds to" if last.fills else "sets", node.id, last.line, None, node.id
            elif last is None and passed and passed[0].place.function is not None:
                yield "passes", node.id, passed[0].line, passed[0].expression, node.id


def _classes(run: RunLines) -> set[str]:
    return {one.name for file in run.files for one in classes_in(file)}


def _is_leaf(one: Origin) -> bool:
    """True for what is taken by name out of a batch or another dictionary."""
    made = one.expression
    key = made.slice if isinstance(made, ast.Subscript) else None
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def _in_force(
    run: RunLines, line: CodeLine, node: ast.Attribute, given: Sequence[Origin]
) -> Origin | None:
    """What an attribute held when a line read it: of several lines in the methods of one class
    that set it, the last that ran before; None if that is not known.
    """
    if len({one.line for one in given}) == 1:
        return given[0]
    place = place_at(line)
    classes = {_class_of(one.place) for one in given}
    if place is None or ast.unparse(node.value) != "self" or classes != {_class_of(place)}:
        return None
    read = run.last.get(line, 0)
    before = [one for one in given if 0 < run.last.get(one.line, 0) < read]
    return max(before, key=lambda one: run.last[one.line], default=None)


def _class_of(place: SourceLine) -> str:
    """The class in which a line stands; "" if none."""
    line, every = place.statement.lineno, classes_in(place.file)
    around = [one for one in every if one.lineno <= line <= (one.end_lineno or 0)]
    return max(around, key=lambda one: one.lineno).name if around else ""


def _far_away(origins: Origins, name: str, given: Origin) -> tuple[str, str, CodeLine]:
    """What sets an attribute; of one that only hands an argument on, what passes this."""
    passed = origins.chain(given) if isinstance(given.expression, ast.Name) else []
    if passed and passed[0].place.function is not given.place.function:
        return "passes", name, passed[0].line
    return "sets", name, given.line


OF_NO_VALUES = frozenset({"grad", "data", "shape", "device", "dtype"})
"""Attributes of a tensor that are not made of its values by an operation."""


def _gives_no_values(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """True for an attribute that is not made of the values of what has it, such as of a config."""
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr in OF_NO_VALUES or not hasattr(Tensor, node.attr)


def _gives_nothing(one: Origin) -> bool:
    """True for a wrapper of the model, the parameters of a module, zeros, and what is empty."""
    made = one.expression
    while isinstance(made, ast.Call) and called_name(made) in ("list", "tuple", "iter"):
        made = made.args[0] if made.args else ast.List([])
    if isinstance(made, ast.ListComp):
        made = made.elt
    if isinstance(made, ast.Call):
        name = called_name(made)
        return name.endswith(("DataParallel", "DDP")) or name in OF_A_MODULE or "zeros" in name
    if isinstance(made, ast.Constant):
        return not made.value
    return not getattr(made, "elts", getattr(made, "keys", True))


def _seeds(one: Origin) -> bool:
    return isinstance(one.place.value, ast.Call) and called_name(one.place.value) in SEEDING
