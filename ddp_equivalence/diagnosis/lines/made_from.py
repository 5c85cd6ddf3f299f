"""The lines behind a line: those that set the variables and attributes that it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import Tensor

from ddp_equivalence.diagnosis.lines.attributes import lines_that_set_attribute
from ddp_equivalence.diagnosis.lines.origins import links_of, returns_of
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import (
    Place,
    called_name,
    inside,
    place_of,
)
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import CodeLine

DEEPEST = 2
"""How many lines are followed, one behind the other."""

FILLING = frozenset({"append", "extend", "insert", "update", "add", "copy_", "add_", "setdefault"})
"""Methods that change what they are called on."""

OF_RANKS = {"rank": "get_rank", "world_size": "get_world_size"}
"""Attributes that say who a rank is, and the functions of torch that know it."""


def lines_behind(
    run: RunLines, line: CodeLine, most: int, *, only_attributes: bool = False
) -> list[PointedLine]:
    """At most so many lines that have run and set what this line reads, the nearest first.

    ``only_attributes``: leave out variables of the same function, which a reader sees anyway.
    """
    found: dict[CodeLine, PointedLine] = {}
    level = [line]
    for _ in range(DEEPEST):
        behind = []
        for reader in level:
            for verb, name, setter in _setters(run, reader, only_attributes):
                behind.append((setter, f"{verb} {name}, which line {reader.number} reads"))
                for returning in lines_that_return(run, setter) if verb == "sets" else ():
                    behind.append((returning, f"returns what line {setter.number} sets {name} to"))
        for setter, note in behind:
            if setter != line:
                found.setdefault(setter, PointedLine(setter, note))
        level = [setter for setter, _ in behind]
    return list(found.values())[:most]


def lines_that_return(run: RunLines, line: CodeLine) -> Iterator[CodeLine]:
    """The lines that have run and returned what a line assigns, if it calls a user's functions."""
    place = place_of(line.file, line.number)
    for node in _in_head(place.statement) if place is not None else ():
        if isinstance(node, ast.Call):
            for returned, _ in returns_of(run, line.file, called_name(node)):
                yield returned


def _in_head(statement: ast.stmt) -> list[ast.AST]:
    """What stands in a statement, without the lines of the block that it opens."""
    heads: list[ast.AST] = [statement]
    if isinstance(statement, (ast.If, ast.While)):
        heads = [statement.test]
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        heads = [statement.iter]
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        heads = [item.context_expr for item in statement.items]
    return [node for head in heads for node in (head, *inside(head))]


def _setters(
    run: RunLines, line: CodeLine, only_attributes: bool
) -> Iterator[tuple[str, str, CodeLine]]:
    """What a line reads, and which line "sets" it, or "passes" it to the function: attributes
    first, since they are set far away.
    """
    place = place_of(line.file, line.number)
    if place is None:
        return
    read = _in_head(place.statement)
    attributes = [
        node.attr
        for node in read
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and (node.value.id == "self" or not hasattr(Tensor, node.attr))  # not .grad or .data
    ]
    for name in dict.fromkeys(attributes):
        for setter in lines_that_set_attribute(run, name):
            if not _asks_the_ranks(setter, name):
                yield "sets", name, setter
    if only_attributes:
        return
    names = [
        node.id for node in read if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]
    for name in dict.fromkeys(names):
        last = _last_that_sets(run, place, line, name)
        passed_at = None if last is not None else _that_passes(run, place, name)
        if last is not None:
            yield "sets", name, last
        elif passed_at is not None:
            yield "passes", name, passed_at


def _that_passes(run: RunLines, place: Place, name: str) -> CodeLine | None:
    """The only line that calls the function of a place and passes this argument to it."""
    if place.function is None:
        return None
    links = links_of(run, place, ast.Name(name, ast.Load()))
    return links[0].line if links and links[0].line.function != place.function.name else None


def _asks_the_ranks(line: CodeLine, name: str) -> bool:
    """True for a line that sets ``rank`` or ``world_size`` to just that: no value can be wrong."""
    place = place_of(line.file, line.number)
    value = getattr(place.statement, "value", None) if place is not None else None
    if isinstance(value, ast.Call):
        return not value.args and not value.keywords and called_name(value) == OF_RANKS.get(name)
    return name in OF_RANKS and isinstance(value, ast.Attribute) and value.attr == name


def _last_that_sets(run: RunLines, place: Place, line: CodeLine, name: str) -> CodeLine | None:
    """The last line above in the same function that has run and set or changed a variable."""
    if place.function is None:
        return None
    lines = [
        place.line(node)
        for node in inside(place.function)
        if _sets(node, name) and getattr(node, "lineno", line.number) < line.number
    ]
    ran = [one for one in lines if run.times.get(one)]
    return max(ran, key=lambda one: one.number, default=None)


def _sets(node: ast.AST, name: str) -> bool:
    """True if a statement sets this variable, an element of it, or calls a method that fills it."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and function.attr in FILLING:
            targets = [function.value]
    parts = [
        part
        for target in targets
        for part in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
    ]
    return any(_base(part) == name for part in parts)


def _base(target: ast.expr) -> str:
    """The variable that a target belongs to: ``parts`` for ``parts[0]``."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""
