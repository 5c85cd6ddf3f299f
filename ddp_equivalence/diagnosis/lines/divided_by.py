"""The lines that made the number by which a line divides or multiplies."""

from __future__ import annotations

import ast

from ddp_equivalence.diagnosis.lines.attributes import (
    lines_in_class_that_set,
)
from ddp_equivalence.diagnosis.lines.origins import Link, links_of
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import (
    called_name,
    functions_named,
    inside,
    place_of,
)
from ddp_equivalence.measurement.calls import CodeLine


def divisors(run: RunLines, line: CodeLine) -> list[Link]:
    """The lines that made the number by which this line divides or multiplies."""
    place = place_of(line.file, line.number)
    if place is None:
        return []
    for node in [place.statement, *inside(place.statement)]:
        expression = _divisor(node)
        if expression is not None:
            if isinstance(expression, ast.BinOp):
                expression = expression.right
            return links_of(run, place, expression)
    return []


def last_setter_of_divisor(run: RunLines, line: CodeLine) -> Link | None:
    """The line that was the last to set ``self.x`` before this line divided or multiplied by it.

    Only lines of the same class count.
    """
    place = place_of(line.file, line.number)
    for node in [place.statement, *inside(place.statement)] if place is not None else ():
        number = _divisor(node)
        if not isinstance(number, ast.Attribute) or not isinstance(number.value, ast.Name):
            continue
        if number.value.id == "self":
            setters = lines_in_class_that_set(run, number.attr, line)
            last = max(setters, key=lambda one: run.last.get(one, 0), default=None)
            return Link(number.attr, last, False) if last is not None else None
    return None


def computes(line: CodeLine, name: str) -> bool:
    """True if a line computes what it sets a variable to, and does not only pass it on: it takes
    no single variable or attribute, and calls no function of the user's.
    """
    place = place_of(line.file, line.number)
    value = getattr(place.statement, "value", None) if place is not None else None
    if isinstance(value, ast.Call):
        return not functions_named(line.file, called_name(value))
    passed_on = (ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.List)
    return bool(name) and isinstance(value, ast.expr) and not isinstance(value, passed_on)


def divisors_in_function(begins: CodeLine) -> tuple[str, ...]:
    """The names of the attributes by which a function, or one inside it, divides."""
    found: dict[str, None] = {}
    for function in functions_named(begins.file, begins.function):
        for node in ast.walk(function):
            expression = _divisor(node)
            if isinstance(expression, ast.Attribute):
                found[expression.attr] = None
    return tuple(found)


def _divisor(node: ast.AST) -> ast.expr | None:
    """What a node of the syntax tree divides or multiplies by; None if it does neither."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Div, ast.Mult)):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.right
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        plain = [one for one in (node.right, node.left) if not _calls(one)]
        return plain[0] if plain else None  # what is called may return the loss
    if isinstance(node, ast.Call) and called_name(node) in SCALING and node.args:
        return node.args[-1]
    return None


def _calls(expression: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(expression))


SCALING = frozenset({"div", "div_", "mul", "mul_", "_foreach_div_", "_foreach_mul_", "true_divide"})
"""The functions of torch that divide or multiply by their last argument."""
