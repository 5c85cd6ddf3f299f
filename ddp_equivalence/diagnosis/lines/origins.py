"""The lines that made what a loop goes through, or any other expression."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_equivalence.diagnosis.lines.arguments import (
    argument_given,
    callers_by_name,
    name_in_calls,
)
from ddp_equivalence.diagnosis.lines.attributes import lines_that_set_attribute
from ddp_equivalence.diagnosis.lines.decisions import lines_that_set_variable
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import (
    Place,
    called_name,
    functions_named,
    inside,
    loops_around,
    place_of,
)
from ddp_equivalence.measurement.calls import CodeLine

MOST_LINKS = 8
"""So many lines are followed from an expression to where it comes from."""

OF_A_MODULE = frozenset(
    {"parameters", "named_parameters", "modules", "named_modules", "children", "named_children"}
    | {"state_dict"}
)
"""Methods that give all of a module, whatever line has made the module."""

OF_AN_OPTIMIZER = ("param_groups",)
"""Attributes that give back what an object was made of."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


@dataclass(frozen=True)
class Link:
    """A line that gave a value its name, or passed it to a function. ``selects``: it takes only a
    part of what it is given, or lists what it takes one by one.
    """

    name: str
    line: CodeLine
    selects: bool


def chosen(links: Sequence[Link]) -> Link | None:
    """The nearest line that selects; without one, the farthest that is known."""
    return next((one for one in links if one.selects), links[-1] if links else None)


def gone_through(run: RunLines, way: Sequence[CodeLine]) -> list[Link]:
    """The lines that made what the innermost loop around a line goes through, the nearest first.

    ``way``: as in ``decisions``. The first line that stands in a loop counts.
    """
    for number, line in enumerate(way):
        place = place_of(line.file, line.number)
        if place is None:
            continue
        place = run.beside_backward(place)
        for expression in _iterables(place, line.number):
            links = links_of(run, place, expression, way[number + 1 :])
            one = [Link("", place.line(expression), True)] if _takes_one(expression) else []
            return [*one, *links]
    return []


def links_of_line(run: RunLines, line: CodeLine, callers: Sequence[CodeLine] = ()) -> list[Link]:
    """The lines that made what this line is made of, and the line itself, the nearest first."""
    place = place_of(line.file, line.number)
    value = getattr(place.statement, "value", None) if place is not None else None
    if place is None or not isinstance(value, ast.expr):
        return []
    first = Link("", line, selects(value))
    return [first, *_links(run, place, value, callers, 0)]


def links_of(
    run: RunLines, place: Place, expression: ast.expr, callers: Sequence[CodeLine] = ()
) -> list[Link]:
    """The lines that have run and made this expression, the nearest first.

    ``callers``: the lines that led to the function of the place; () if they are not known. The line
    of the expression itself is the first one, if it selects.
    """
    own = [Link("", place.line(expression), True)] if selects(expression) else []
    return [*own, *_links(run, place, expression, callers, 0)]


def selects(expression: ast.expr) -> bool:
    """True if an expression takes a part of something, or lists what it takes one by one."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return True
        if isinstance(node, COMPREHENSIONS) and any(one.ifs for one in node.generators):
            return True
        if isinstance(node, ast.Call) and called_name(node) in ("filter", "islice"):
            return True
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
            return all(isinstance(one, (ast.Attribute, ast.Name)) for one in node.elts)
    return False


def _takes_one(expression: ast.expr) -> bool:
    """True if an expression takes one of several by its number, such as ``groups[0]["params"]``."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and type(node.slice.value) is int
        for node in ast.walk(expression)
    )


def _iterables(place: Place, number: int) -> Iterator[ast.expr]:
    """What comprehensions on this line, and then the loops around it, go through."""
    for node in [place.statement, *inside(place.statement)]:
        if isinstance(node, COMPREHENSIONS) and (
            node.lineno <= number <= (node.end_lineno or node.lineno)
        ):
            yield from (one.iter for one in node.generators)
    if isinstance(place.statement, (ast.For, ast.AsyncFor)):
        yield place.statement.iter
    for loop in loops_around(place):
        if not isinstance(loop, ast.While):
            yield loop.iter


def _links(
    run: RunLines, place: Place, expression: ast.expr, callers: Sequence[CodeLine], depth: int
) -> list[Link]:
    if depth >= MOST_LINKS:
        return []
    if isinstance(expression, ast.Name):
        iterated = _iterated(place, expression)
        if iterated is not None:
            own = [Link(expression.id, place.line(iterated), True)] if selects(iterated) else []
            return [*own, *_links(run, place, iterated, callers, depth + 1)]
        lines = lines_that_set_variable(run, place, expression.id)
        if len(lines) == 1:
            return _of_assignment(run, expression.id, lines[0], callers, depth)
        return [] if lines else _argument(run, place, expression.id, callers, depth)
    if isinstance(expression, ast.Attribute):
        lines = lines_that_set_attribute(run, expression.attr)
        if not lines and expression.attr in OF_AN_OPTIMIZER:
            return _links(run, place, expression.value, callers, depth + 1)
        return _of_assignment(run, expression.attr, lines[0], (), depth) if lines else []
    if isinstance(expression, ast.Call):
        returned = _returned_by(run, place, expression, depth)
        if returned:
            return returned
    for part in _parts(expression):
        found = _links(run, place, part, callers, depth)
        if found:
            return found
    return []


def _iterated(place: Place, name: ast.Name) -> ast.expr | None:
    """What the comprehension around this variable goes through for it; None without one."""
    for node in [place.statement, *inside(place.statement)]:
        if isinstance(node, COMPREHENSIONS) and any(one is name for one in ast.walk(node)):
            for one in node.generators:
                parts = [part.id for part in ast.walk(one.target) if isinstance(part, ast.Name)]
                if name.id in parts:
                    return one.iter
    return None


def _parts(expression: ast.expr) -> Iterator[ast.expr]:
    """What an expression is made of, as far as values go through it."""
    if isinstance(expression, ast.Call):
        if called_name(expression) in OF_A_MODULE:
            return
        yield from expression.args
        if isinstance(expression.func, ast.Attribute):
            yield expression.func.value
    elif isinstance(expression, COMPREHENSIONS):
        yield from (one.iter for one in expression.generators)
    elif isinstance(expression, (ast.Subscript, ast.Starred)):
        yield expression.value
    elif isinstance(expression, ast.BinOp):
        yield from (expression.left, expression.right)
    elif isinstance(expression, ast.UnaryOp):
        yield expression.operand
    elif isinstance(expression, (ast.List, ast.Tuple)):
        yield from expression.elts


def _of_assignment(
    run: RunLines, name: str, line: CodeLine, callers: Sequence[CodeLine], depth: int
) -> list[Link]:
    """The line that sets a name, and the lines that made what it sets it to."""
    place = place_of(line.file, line.number)
    if place is None:
        return []
    if isinstance(place.statement, (ast.For, ast.AsyncFor)):
        made = _links(run, place, place.statement.iter, callers, depth + 1)
        return made or [Link(name, line, selects(place.statement.iter))]
    value = _keyword_value(place.statement, name) or getattr(place.statement, "value", None)
    if not isinstance(value, ast.expr):
        return [Link(name, line, False)]
    item = _item_of(place.statement, name)
    value = _item(value, item)
    own = Link(name, line, selects(value))
    if item is not None and isinstance(value, ast.Call):
        return [own, *_item_returned(run, place, value, item, depth + 1)]
    return [own, *_links(run, place, value, callers, depth + 1)]


def _item_of(statement: ast.stmt, name: str) -> int | None:
    """The place of a variable among those to which an assignment unpacks its value."""
    for target in statement.targets if isinstance(statement, ast.Assign) else ():
        for number, one in enumerate(target.elts if isinstance(target, ast.Tuple) else ()):
            if isinstance(one, ast.Name) and one.id == name:
                return number
    return None


def _item(value: ast.expr, item: int | None) -> ast.expr:
    """What an expression gives for one of several variables; all of it if it does not say."""
    if item is None or not isinstance(value, ast.Tuple) or item >= len(value.elts):
        return value
    return value.elts[item]


def _item_returned(
    run: RunLines, place: Place, call: ast.Call, item: int, depth: int
) -> list[Link]:
    """The lines that made one of several values that a function of the user's returns."""
    for line, value in returns_of(run, place.file, called_name(call)):
        inner = place_of(line.file, line.number)
        if inner is None or not isinstance(value, ast.Tuple) or item >= len(value.elts):
            return []
        return _links(run, inner, value.elts[item], (), depth)
    return []


def _keyword_value(statement: ast.stmt, name: str) -> ast.expr | None:
    for node in [statement, *inside(statement)]:
        if isinstance(node, ast.keyword) and node.arg == name:
            return node.value
    return None


def _returned_by(run: RunLines, place: Place, call: ast.Call, depth: int) -> list[Link]:
    """The line that has run and returned or yielded what this function of the user's gives, and
    the lines that made this.
    """
    for line, value in returns_of(run, place.file, called_name(call)):
        inner = place_of(line.file, line.number)
        link = Link(called_name(call), line, value is not None and selects(value))
        made = _links(run, inner, value, (), depth + 1) if inner is not None and value else []
        return [link, *made]
    return []


def returns_of(run: RunLines, file: str, name: str) -> Iterator[tuple[CodeLine, ast.expr | None]]:
    """The lines that have run and returned or yielded what a function of this name gives, and what.

    Only functions of the same file are known, and only those whose name none of the others has.
    """
    functions = functions_named(file, name) if name else []
    for node in inside(functions[0]) if len(functions) == 1 else ():
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            line = CodeLine(file, node.lineno, name)
            if run.times.get(line):
                yield line, node.value


def _argument(
    run: RunLines, place: Place, name: str, callers: Sequence[CodeLine], depth: int
) -> list[Link]:
    """Where an argument of the place's function comes from."""
    function = place.function
    if function is None:
        return []
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if name not in names and name not in [one.arg for one in function.args.kwonlyargs]:
        return []
    called = name_in_calls(place.file, function)
    callers = callers or callers_by_name(run, called)
    above = place_of(callers[0].file, callers[0].number) if callers else None
    if above is None:
        return []
    for node in [above.statement, *inside(above.statement)]:
        if isinstance(node, ast.Call) and called_name(node) == called:
            value = argument_given(node, names, name, called != function.name)
            if value is None:
                return []
            link = Link(name, above.line(value), selects(value))
            return [link, *_links(run, above, value, callers[1:], depth + 1)]
    return []
