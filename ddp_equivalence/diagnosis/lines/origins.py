"""Which lines made what a line reads: the user's source, followed back."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ddp_equivalence.diagnosis.lines.source_tree import (
    Function,
    RunLines,
    SourceLine,
    called_name,
    functions_named,
    inside,
    lines_that_set_variable,
    loops_around,
    place_of,
    tree_of,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.measurement.calls import CodeLine

# The lines that made what a loop goes through, or any other expression.

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
    run: RunLines, place: SourceLine, expression: ast.expr, callers: Sequence[CodeLine] = ()
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


def _iterables(place: SourceLine, number: int) -> Iterator[ast.expr]:
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
    run: RunLines, place: SourceLine, expression: ast.expr, callers: Sequence[CodeLine], depth: int
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


def _iterated(place: SourceLine, name: ast.Name) -> ast.expr | None:
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
    run: RunLines, place: SourceLine, call: ast.Call, item: int, depth: int
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


def _returned_by(run: RunLines, place: SourceLine, call: ast.Call, depth: int) -> list[Link]:
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
    run: RunLines, place: SourceLine, name: str, callers: Sequence[CodeLine], depth: int
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


# The lines behind a line: those that set the variables and attributes that it reads.

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


def _that_passes(run: RunLines, place: SourceLine, name: str) -> CodeLine | None:
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


def _last_that_sets(run: RunLines, place: SourceLine, line: CodeLine, name: str) -> CodeLine | None:
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


# The lines that made the number by which a line divides or multiplies.


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
        plain = [one for one in (node.right, node.left) if not _holds_a_call(one)]
        return plain[0] if plain else None  # what is called may return the loss
    if isinstance(node, ast.Call) and called_name(node) in SCALING and node.args:
        return node.args[-1]
    return None


def _holds_a_call(expression: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(expression))


SCALING = frozenset({"div", "div_", "mul", "mul_", "_foreach_div_", "_foreach_mul_", "true_divide"})
"""The functions of torch that divide or multiply by their last argument."""


# Which calls pass what to the arguments of a function.


def name_in_calls(file: str, function: Function) -> str:
    """The name by which a function is called: that of its class for a constructor."""
    tree = tree_of(file)
    if function.name == "__init__" and tree is not None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and function in node.body:
                return node.name
    return function.name


def argument_given(
    call: ast.Call, names: Sequence[str], name: str, constructs: bool
) -> ast.expr | None:
    """The expression that a call gives for an argument; None if it does not say so plainly."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name not in names or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    bound = isinstance(call.func, ast.Attribute) and names[0] in ("self", "cls")
    at = names.index(name) - (1 if bound or constructs else 0)
    return call.args[at] if 0 <= at < len(call.args) else None


def callers_by_name(run: RunLines, name: str) -> list[CodeLine]:
    """The only line that has run and calls a function of this name; [] if there are several."""
    found: dict[CodeLine, None] = {}
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and called_name(node) == name:
                line = line_in_function(file, node.lineno)
                if line is not None and run.times.get(line):
                    found[line] = None
    return list(found) if len(found) == 1 else []


# The lines that set an attribute of an object.


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
