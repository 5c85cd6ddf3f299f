"""What made a value of the user's code: the nearest line, or all expressions that went into it."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ddp_equivalence.diagnosis.lines.source import (
    COMPREHENSIONS,
    Bindings,
    Bound,
    Function,
    RunLines,
    SourceLine,
    argument_given,
    arguments_of,
    called_name,
    copied_attribute,
    functions_named,
    inside,
    is_in_class,
    last_line_that_sets,
    last_name,
    lines_that_call,
    lines_that_set_attribute,
    lines_that_set_variable,
    name_in_calls,
    place_at,
    place_of,
    returns_of,
    skipping,
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
        place = place_at(line)
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
    place = place_at(line)
    if place is None or place.value is None:
        return []
    return [Link("", line, selects(place.value)), *_links(run, place, place.value, callers, 0)]


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
    for node in place.nodes:
        if isinstance(node, COMPREHENSIONS) and (
            node.lineno <= number <= (node.end_lineno or node.lineno)
        ):
            yield from (one.iter for one in node.generators)
    for loop in (place.statement, *place.loops):
        if isinstance(loop, (ast.For, ast.AsyncFor)):
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
        name = called_name(expression)
        for line, value in returns_of(run, place.file, name):
            link = Link(name, line, value is not None and selects(value))
            inner = place_at(line)
            made = _links(run, inner, value, (), depth + 1) if inner is not None and value else []
            return [link, *made]
    found = (_links(run, place, part, callers, depth) for part in _parts(expression))
    return next(filter(None, found), [])


def _iterated(place: SourceLine, name: ast.Name) -> ast.expr | None:
    """What the comprehension around this variable goes through for it; None without one."""
    for node in place.nodes:
        if isinstance(node, COMPREHENSIONS) and any(one is name for one in ast.walk(node)):
            for one in node.generators:
                if name.id in [last_name(part) for part in ast.walk(one.target)]:
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
    place = place_at(line)
    if place is None:
        return []
    statement = place.statement
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        made = _links(run, place, statement.iter, callers, depth + 1)
        return made or [Link(name, line, selects(statement.iter))]
    given = (one.value for one in place.nodes if isinstance(one, ast.keyword) and one.arg == name)
    value = next(given, place.value)
    if value is None:
        return [Link(name, line, False)]
    item = _item_of(statement, name)
    value = _item(value, item)
    own = Link(name, line, selects(value))
    if item is None or not isinstance(value, ast.Call):
        return [own, *_links(run, place, value, callers, depth + 1)]
    for returned_at, returned in returns_of(run, place.file, called_name(value)):
        inner = place_at(returned_at)
        if inner is not None and isinstance(returned, ast.Tuple) and item < len(returned.elts):
            return [own, *_links(run, inner, returned.elts[item], (), depth + 1)]
        return [own]
    return [own]


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


def _argument(
    run: RunLines, place: SourceLine, name: str, callers: Sequence[CodeLine], depth: int
) -> list[Link]:
    """Where an argument of the place's function comes from."""
    function = place.function
    if function is None or name not in arguments_of(function):
        return []
    called = name_in_calls(place.file, function)
    by_name = lines_that_call(run, called) if not callers else []
    callers = callers or (by_name if len(by_name) == 1 else ())
    above = place_at(callers[0]) if callers else None
    for node in above.nodes if above is not None else ():
        if isinstance(node, ast.Call) and called_name(node) == called and above is not None:
            names = arguments_of(function, keyword_only=False)
            value = argument_given(node, names, name, called != function.name)
            if value is None:
                return []
            link = Link(name, above.line(value), selects(value))
            return [link, *_links(run, above, value, callers[1:], depth + 1)]
    return []


# The lines behind a line: those that set the variables and attributes that it reads.

DEEPEST = 2
"""How many lines are followed, one behind the other."""

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
    place = place_at(line)
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
    place = place_at(line)
    if place is None:
        return
    read = [
        node
        for node in _in_head(place.statement)
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load)
    ]
    attributes = [
        node.attr
        for node in read
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id == "self" or not hasattr(Tensor, node.attr))  # not .grad or .data
    ]
    for name in dict.fromkeys(attributes):
        for setter in lines_that_set_attribute(run, name):
            if not _asks_the_ranks(setter, name):
                yield "sets", name, setter
    names = [] if only_attributes else [node.id for node in read if isinstance(node, ast.Name)]
    for name in dict.fromkeys(names):
        last = last_line_that_sets(run, place, line, name)
        if last is not None:
            yield "sets", name, last
        elif place.function is not None:
            links = links_of(run, place, ast.Name(name, ast.Load()))
            if links and links[0].line.function != place.function.name:
                yield "passes", name, links[0].line


def _asks_the_ranks(line: CodeLine, name: str) -> bool:
    """True for a line that sets ``rank`` or ``world_size`` to just that: no value can be wrong."""
    place = place_at(line)
    value = place.value if place is not None else None
    if isinstance(value, ast.Call):
        return not value.args and not value.keywords and called_name(value) == OF_RANKS.get(name)
    return name in OF_RANKS and isinstance(value, ast.Attribute) and value.attr == name


def line_of_compared(run: RunLines, test: ast.expr | None, at: CodeLine) -> list[PointedLine]:
    """The only line that set an attribute which a condition compares; [] if there are several.

    Of an attribute that is set to another one and counted from there, it is the line of the other.
    """
    for node in ast.walk(test) if isinstance(test, ast.Compare) else ():
        if isinstance(node, ast.Attribute):
            for line in lines_that_set_attribute(run, node.attr):
                return [PointedLine(line, f"sets {node.attr}, which line {at.number} compares")]
            name = copied_attribute(run, node.attr)
            for line in lines_that_set_attribute(run, name) if name else ():
                note = f"sets {name}; {node.attr} begins with it, which line {at.number} compares"
                return [PointedLine(line, note)]
    return []


# The lines that made the number by which a line divides or multiplies.

SCALING = frozenset({"div", "div_", "mul", "mul_", "_foreach_div_", "_foreach_mul_", "true_divide"})
"""The functions of torch that divide or multiply by their last argument."""


def divisors(run: RunLines, line: CodeLine) -> list[Link]:
    """The lines that made the number by which this line divides or multiplies."""
    place = place_at(line)
    for expression in _divisors_in(place.nodes) if place is not None else ():
        number = expression.right if isinstance(expression, ast.BinOp) else expression
        return links_of(run, place, number) if place is not None else []
    return []


def computes(line: CodeLine, name: str) -> bool:
    """True if a line computes what it sets a variable to, and does not only pass it on: it takes
    no single variable or attribute, and calls no function of the user's.
    """
    place = place_at(line)
    value = place.value if place is not None else None
    if isinstance(value, ast.Call):
        return not functions_named(line.file, called_name(value))
    passed_on = (ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.List)
    return bool(name) and value is not None and not isinstance(value, passed_on)


def divisors_in_function(begins: CodeLine | None) -> tuple[str, ...]:
    """The names of the attributes by which a function, or one inside it, divides."""
    functions = functions_named(begins.file, begins.function) if begins is not None else []
    nodes = (node for function in functions for node in ast.walk(function))
    found = (one.attr for one in _divisors_in(nodes) if isinstance(one, ast.Attribute))
    return tuple(dict.fromkeys(found))


def _divisors_in(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What the nodes of a syntax tree divide or multiply by."""
    for node in nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Div, ast.Mult)):
            yield node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            yield from [one for one in (node.right, node.left) if not _holds_a_call(one)][:1]
        elif isinstance(node, ast.Call) and called_name(node) in SCALING and node.args:
            yield node.args[-1]


def _holds_a_call(expression: ast.expr) -> bool:
    """True if an expression calls something, which may return the loss."""
    return any(isinstance(node, ast.Call) for node in ast.walk(expression))


# All expressions that one was made of, and those of them that choose what is taken.

MOST_EXPRESSIONS = 400
"""So many expressions are followed."""

DEEPEST_NUMBER = 4
"""So often a name is looked up to see whether a number comes from the rank."""

MOST_NAMES = 8
"""Through so many names an expression is followed to where it is made."""

OF_THE_RANK = re.compile(r"rank|world_?size|replica|process_index|process_count|num_processes")
"""Words in the names of what says which rank this is, or how many there are."""

CHOOSING = frozenset(
    {"islice", "narrow", "index_select", "select", "take", "take_along_dim", "masked_select"}
    | {"chunk", "split", "tensor_split", "array_split", "compress", "Subset", "batched"}
)
"""Functions that take a part of their first argument, or of what they are a method of."""

MAKING_INDICES = frozenset({"range", "arange", "slice", "randperm", "linspace"})
"""Functions that make positions of their arguments."""

MODULES = ("torch", "np", "numpy", "itertools", "data")

COMPUTING = frozenset({"divmod", "min", "max", "ceil", "floor", "round"})


@dataclass(frozen=True)
class Origin:
    """An expression that another one was made of. ``chooses``: it does not hold the values, but
    says which of them are taken.
    """

    place: SourceLine
    expression: ast.expr
    chooses: bool

    @property
    def line(self) -> CodeLine:
        """Where the expression begins."""
        return self.place.line(self.expression)

    @property
    def computes(self) -> bool:
        """True if it is made by arithmetic or a comparison, not only handed on."""
        return _computes(self.expression)


@dataclass(frozen=True)
class Choice:
    """A line that says which values are taken. ``distance``: so often a name must be looked up to
    see that this depends on the rank; None if it does not. ``names``: those of the rank in the
    line, as they stand there. ``computes``: it does not only hand on what other lines computed.
    """

    line: CodeLine
    distance: int | None
    names: tuple[str, ...] = ()
    computes: bool = False


@dataclass(frozen=True)
class Sources:
    """``run``: what has run on one rank."""

    run: RunLines
    _distances: dict[tuple[str, int, int, int, int], int | None] = field(default_factory=dict)

    @cached_property
    def bindings(self) -> Bindings:
        """What names were given."""
        return Bindings(self.run)

    def of_line(self, line: CodeLine) -> list[Origin]:
        """All expressions that what a line says was made of, the nearest first, with its own."""
        place = place_at(line)
        if place is None:
            return []
        return self.of([Origin(place, one, False) for one in _heads(place.statement)])

    def of(self, begin: Sequence[Origin]) -> list[Origin]:
        """All expressions that these were made of, the nearest first, with these."""
        found: dict[tuple[str, int, int, int, bool], Origin] = {}
        waiting = deque(begin)
        while waiting and len(found) < MOST_EXPRESSIONS:
            source = waiting.popleft()
            key = (*_key(source.place, source.expression), source.chooses)
            if key not in found:
                found[key] = source
                waiting.extend(self._made_of(source))
        return list(found.values())

    def choices(self, line: CodeLine) -> list[Choice]:
        """The lines that choose which values a line holds, the nearest first."""
        found: dict[CodeLine, Choice] = {}
        for source in self.of_line(line):
            for node in _choosing_parts(source):
                at, distance = source.place.line(node), self._distance(source.place, node)
                known = found.get(at, Choice(at, None))
                distances = [one for one in (distance, known.distance) if one is not None]
                names = (*known.names, *_names_of_rank(source.place, node))
                found[at] = Choice(
                    at,
                    min(distances, default=None),
                    tuple(dict.fromkeys(names)),
                    known.computes or bool(names) or _computes(node),
                )
        return list(found.values())

    def lines_of_rank(self, line: CodeLine) -> list[CodeLine]:
        """The lines on the way to what a line says that name the rank, without this line."""
        named = [
            one.line for one in self.of_line(line) if _names_of_rank(one.place, one.expression)
        ]
        return [one for one in dict.fromkeys(named) if one != line]

    def _made_of(self, source: Origin) -> Iterator[Origin]:
        for node, chooses in _mentions(source.expression, source.chooses):
            for place, expression in self.bindings.of(source.place, node):
                yield Origin(place, expression, chooses)
                for test in _guards(place):
                    yield Origin(place, test, True)

    def _distance(self, place: SourceLine, node: ast.expr, depth: int = 0) -> int | None:
        """How often a name must be looked up until a word of the rank appears; None if never."""
        if _names_of_rank(place, node):
            return 0
        if depth >= DEEPEST_NUMBER:
            return None
        key = (*_key(place, node), depth)
        if key not in self._distances:
            self._distances[key] = None  # what refers to itself says nothing
            below = [
                found
                for part, _ in _mentions(node, True)
                for at, expression in self.bindings.of(place, part)
                if (found := self._distance(at, expression, depth + 1)) is not None
            ]
            self._distances[key] = 1 + min(below) if below else None
        return self._distances[key]


def _computes(expression: ast.expr) -> bool:
    return any(
        isinstance(node, (ast.BinOp, ast.Compare, ast.IfExp))
        or (isinstance(node, ast.Call) and called_name(node) in COMPUTING)
        for node in ast.walk(expression)
    )


def _names_of_rank(place: SourceLine, node: ast.AST) -> tuple[str, ...]:
    """What an expression names of the rank, or of the number of ranks, as it stands there."""
    name = last_name(node)
    if name and (OF_THE_RANK.search(name.lower()) or _is_a_rank(place.function, name)):
        return (ast.unparse(node),)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,) if OF_THE_RANK.search(node.value.lower()) else ()
    children = (_names_of_rank(place, child) for child in ast.iter_child_nodes(node))
    return tuple(dict.fromkeys(one for names in children for one in names))


def _is_a_rank(function: Function | None, name: str) -> bool:
    """True for an argument that is annotated as a rank."""
    of = function.args if function is not None else None
    return of is not None and any(
        one.arg == name and one.annotation is not None and "Rank" in ast.unparse(one.annotation)
        for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)
    )


def _key(place: SourceLine, node: ast.expr) -> tuple[str, int, int, int]:
    return place.file, node.lineno, node.col_offset, node.end_col_offset or 0


def _heads(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement, without those of the block that it opens."""
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [item.context_expr for item in statement.items]
    children = [one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.expr)]
    return [one for one in children if not isinstance(getattr(one, "ctx", None), ast.Store)]


def _mentions(node: ast.AST, chooses: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The names, attributes and calls in an expression, and whether they choose what it takes."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
        yield node, chooses
    choosing = {id(one) for one in _choosing(node)}
    for child in ast.iter_child_nodes(node):
        yield from _mentions(child, chooses or id(child) in choosing)


def _choosing(node: ast.AST) -> list[ast.expr]:
    """The parts of a node of the syntax tree that say which of the others are taken."""
    if isinstance(node, ast.Subscript):
        return [] if isinstance(node.slice, ast.Constant) else [node.slice]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if not isinstance(node, ast.Call):
        return []
    name = called_name(node)
    if name in MAKING_INDICES:
        return node.args
    if name in CHOOSING:
        # Unlike a method, a function of a module gets the values as its first argument.
        owner = (
            node.func.value
            if isinstance(node.func, ast.Attribute)
            else ast.Name("torch", ast.Load())
        )
        is_function = isinstance(owner, ast.Name) and owner.id in MODULES
        return [*node.args[is_function:], *(one.value for one in node.keywords)]
    return node.args[:1] if name == "filter" else []


def _choosing_parts(source: Origin) -> list[ast.expr]:
    """The parts of an expression that say which values are taken, and compute positions for it."""
    parts = [part for node in ast.walk(source.expression) for part in _choosing(node)]
    return [*parts, source.expression] if source.chooses and source.computes else parts


def _guards(place: SourceLine) -> Iterator[ast.expr]:
    """The conditions under which a function yields an expression, or puts it into a list."""
    statement = place.statement
    if not isinstance(statement, ast.Expr) or not isinstance(place.value, (ast.Yield, ast.Call)):
        return
    yield from (one.test for one in place.conditions)
    for loop in place.loops:
        for node in skipping(loop):
            at = place_of(place.file, node.lineno)
            if at is not None and node.lineno < statement.lineno:
                yield from (one.test for one in at.conditions[:1])


def given_to_class(
    run: RunLines, kind: str, arguments: Sequence[str], name: str
) -> Iterator[Bound]:
    """What the calls that have run give a class of this name for one of its arguments."""
    for place, call in Bindings(run).calls(kind):
        value = argument_given(call, ["self", *arguments], name, constructs=True)
        if value is not None:
            yield place, value


def set_in_class(run: RunLines, kind: str, name: str) -> list[Bound]:
    """What the code of a class of this name sets an attribute to."""
    attribute = ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())
    found = Bindings(run).of_attribute(attribute)
    return [(place, value) for place, value in found if is_in_class(place.line(value), kind)]


def sole_origin(run: RunLines, bound: Bound) -> CodeLine | None:
    """The line of the only expression that made a value, through names and functions of the user's;
    None if there are several.
    """
    bindings = Bindings(run)
    for _ in range(MOST_NAMES):
        given = bindings.of(*bound)
        if len(given) != 1:
            return None if given else bound[0].line(bound[1])
        bound = given[0]
    return None


def lines_that_made(run: RunLines, bound: Bound) -> list[CodeLine]:
    """The lines that computed what is given here, then those that set what went into it.

    The lines of functions come first, since what stands outside of them is far away.
    """
    place, expression = bound
    sources = Sources(run).of([Origin(place, expression, False)])
    if isinstance(expression, (ast.Name, ast.Attribute)):
        sources = sources[1:]  # this line only hands on what another one made
    first = place.function.name if place.function is not None else ""
    sources.sort(
        key=lambda one: (
            one.place.function is None,
            not one.computes,
            one.place.function is None or one.place.function.name != first,
        )
    )
    return list(dict.fromkeys(one.line for one in sources))
