"""The lines that made what a loop goes through, or a number that something is divided by."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddp_equivalence.diagnosis.lines.decisions import lines_that_set_variable
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import (
    Place,
    called_name,
    functions_named,
    inside,
    loops_around,
    place_of,
    tree_of,
)
from ddp_equivalence.measurement.calls import CodeLine

PASSED_ON = frozenset(
    {"enumerate", "reversed", "list", "tuple", "sorted", "iter", "zip", "int", "float", "len"}
)
"""Functions whose result is made of their arguments."""

MOST_CALLS_UP = 3
"""So many functions are followed from an argument to where it comes from."""


def iterables(run: RunLines, way: Sequence[CodeLine]) -> list[tuple[str, CodeLine]]:
    """The lines that made what the innermost loop around a line goes through, with its name.

    ``way``: as in ``decisions``. The first line that stands in a loop counts.
    """
    for number, line in enumerate(way):
        place = place_of(line.file, line.number)
        if place is None:
            continue
        for expression in _gone_through(place, line.number):
            return origins(run, place, expression, way[number + 1 :])
    return []


def _gone_through(place: Place, number: int) -> Iterator[ast.expr]:
    """What comprehensions on this line, and then the loops around it, go through."""
    for node in [place.statement, *inside(place.statement)]:
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)) and (
            node.lineno <= number <= (node.end_lineno or node.lineno)
        ):
            yield from (one.iter for one in node.generators)
    if isinstance(place.statement, (ast.For, ast.AsyncFor)):
        yield place.statement.iter
    for loop in loops_around(place):
        if not isinstance(loop, ast.While):
            yield loop.iter


def origins(
    run: RunLines, place: Place, expression: ast.expr, callers: Sequence[CodeLine], up: int = 0
) -> list[tuple[str, CodeLine]]:
    """The lines that have run and made this expression, with the names that they gave it.

    ``callers``: the lines that led to the function of the place; () if they are not known.
    """
    if isinstance(expression, ast.Call):
        if isinstance(expression.func, ast.Name) and expression.func.id in PASSED_ON:
            parts: list[ast.expr] = list(expression.args)
        elif isinstance(expression.func, ast.Attribute) and _is_of_dict(expression):
            parts = [expression.func.value]
        else:
            return _returned_by(run, place, expression)
        return [one for part in parts for one in origins(run, place, part, callers, up)]
    if isinstance(expression, (ast.Subscript, ast.Starred)):
        return origins(run, place, expression.value, callers, up)
    if isinstance(expression, ast.Attribute):
        return [(expression.attr, one) for one in lines_that_set_attribute(run, expression.attr)]
    if isinstance(expression, ast.Name):
        lines = lines_that_set_variable(run, place, expression.id)
        if lines:
            return [(expression.id, one) for one in lines]
        return _argument(run, place, expression.id, callers, up)
    return []


def _is_of_dict(call: ast.Call) -> bool:
    return called_name(call) in ("values", "items", "keys") and not call.args


def lines_that_set_attribute(run: RunLines, name: str) -> list[CodeLine]:
    """The lines that have run and set an attribute of this name, or gave it to a constructor.

    () if several different lines did.
    """
    found: dict[CodeLine, None] = {}
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            line = _line_if_sets(file, node, name)
            if line is not None and run.times.get(line):
                found[line] = None
    direct = [line for line in found if line.function != "<module>"]
    return direct if len(direct) == 1 else []


def _line_if_sets(file: str, node: ast.AST, name: str) -> CodeLine | None:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target] if node.value is not None else []
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == name and called_name(node)[:1].isupper():
                return _in_function(file, keyword.value.lineno)
        return None
    else:
        return None
    for target in targets:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if any(isinstance(one, ast.Attribute) and one.attr == name for one in parts):
            return _in_function(file, target.lineno)
    return None


def _in_function(file: str, number: int) -> CodeLine | None:
    place = place_of(file, number)
    if place is None:
        return None
    name = place.function.name if place.function is not None else "<module>"
    return CodeLine(file, number, name)


def _returned_by(run: RunLines, place: Place, call: ast.Call) -> list[tuple[str, CodeLine]]:
    """The lines that have run and returned or yielded what this function of the user's gives."""
    name = called_name(call)
    functions = functions_named(place.file, name) if name else []
    if len(functions) != 1:
        return []
    found: dict[CodeLine, None] = {}
    for node in inside(functions[0]):
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            line = CodeLine(place.file, node.lineno, name)
            if run.times.get(line):
                found[line] = None
    return [(name, line) for line in found]


def _argument(
    run: RunLines, place: Place, name: str, callers: Sequence[CodeLine], up: int
) -> list[tuple[str, CodeLine]]:
    """Where an argument of the place's function comes from."""
    function = place.function
    if function is None or up >= MOST_CALLS_UP:
        return []
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if name not in names and name not in [one.arg for one in function.args.kwonlyargs]:
        return []
    callers = callers or _callers_by_name(run, place, function.name)
    if not callers:
        return []
    above = place_of(callers[0].file, callers[0].number)
    if above is None:
        return []
    for node in [above.statement, *inside(above.statement)]:
        if isinstance(node, ast.Call) and called_name(node) == function.name:
            given = _given(node, names, name)
            if given is None:
                return []
            found = origins(run, above, given, callers[1:], up + 1)
            return found or [(name, above.line(given))]
    return []


def _given(call: ast.Call, names: Sequence[str], name: str) -> ast.expr | None:
    """The expression that a call gives for an argument; None if it does not say so plainly."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name not in names or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    bound = isinstance(call.func, ast.Attribute) and names[0] in ("self", "cls")
    at = names.index(name) - (1 if bound else 0)
    return call.args[at] if 0 <= at < len(call.args) else None


def _callers_by_name(run: RunLines, place: Place, name: str) -> list[CodeLine]:
    """The only line that has run and calls a function of this name; [] if there are several."""
    found: dict[CodeLine, None] = {}
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and called_name(node) == name:
                line = _in_function(file, node.lineno)
                if line is not None and run.times.get(line):
                    found[line] = None
    return list(found) if len(found) == 1 else []


def divisors(run: RunLines, line: CodeLine) -> list[tuple[str, CodeLine]]:
    """The lines that made the number by which this line divides or multiplies, with its name."""
    place = place_of(line.file, line.number)
    if place is None:
        return []
    for node in [place.statement, *inside(place.statement)]:
        expression = _divisor(node)
        if expression is not None:
            if isinstance(expression, ast.BinOp):
                expression = expression.right
            return origins(run, place, expression, ())
    return []


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
    if isinstance(node, ast.Call) and called_name(node) in SCALING and node.args:
        return node.args[-1]
    return None


SCALING = frozenset({"div", "div_", "mul", "mul_", "_foreach_div_", "_foreach_mul_", "true_divide"})
"""The functions of torch that divide or multiply by their last argument."""
