"""Follows an expression of the user's code back to all expressions that it was made of."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from torch import Tensor

from ddp_equivalence.diagnosis.lines.of_reduction import way_to
from ddp_equivalence.diagnosis.lines.origins import (
    FILLING,
    argument_given,
    line_in_function,
    name_in_calls,
)
from ddp_equivalence.diagnosis.lines.source_tree import (
    FUNCTIONS,
    Function,
    RunLines,
    SourceLine,
    called_name,
    inside,
    is_in_class,
    loops_around,
    place_of,
    run_lines,
    skipping,
    tree_of,
)
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine

MOST_EXPRESSIONS = 400
"""So many expressions are followed."""

DEEPEST_NUMBER = 4
"""So often a name is looked up to see whether a number comes from the rank."""

OF_THE_RANK = re.compile(r"rank|world_?size|replica|process_index|process_count|num_processes")
"""Words in the names of what says which rank this is, or how many there are."""

CHOOSING = frozenset(
    {"islice", "narrow", "index_select", "select", "take", "take_along_dim", "masked_select"}
    | {"chunk", "split", "tensor_split", "array_split", "compress", "Subset", "batched"}
)
"""Functions that take a part of their first argument, or of what they are a method of."""

MAKING_INDICES = frozenset({"range", "arange", "slice", "randperm", "linspace"})
"""Functions that make positions of their arguments."""

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
        place = place_of(line.file, line.number)
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
                names = (*known.names, *names_of_rank(source.place, node))
                found[at] = Choice(
                    at,
                    min(distances, default=None),
                    tuple(dict.fromkeys(names)),
                    known.computes or bool(names) or _computes(node),
                )
        return list(found.values())

    def lines_of_rank(self, line: CodeLine) -> list[CodeLine]:
        """The lines on the way to what a line says that name the rank, without this line."""
        named = [one.line for one in self.of_line(line) if names_of_rank(one.place, one.expression)]
        return [one for one in dict.fromkeys(named) if one != line]

    def _made_of(self, source: Origin) -> Iterator[Origin]:
        for node, chooses in _mentions(source.expression, source.chooses):
            for place, expression in self.bound(source.place, node):
                yield Origin(place, expression, chooses)
                for test in _guards(place, expression):
                    yield Origin(place, test, True)

    def bound(self, place: SourceLine, node: ast.expr) -> list[Bound]:
        """What a name or an attribute was given, or what a call returned."""
        if isinstance(node, ast.Name):
            return self.bindings.of_name(place, node.id) if node.id != "self" else []
        if isinstance(node, ast.Attribute):
            return self.bindings.of_attribute(node)
        return self.bindings.of_call(node) if isinstance(node, ast.Call) else []

    def _distance(self, place: SourceLine, node: ast.expr, depth: int = 0) -> int | None:
        """How often a name must be looked up until a word of the rank appears; None if never."""
        if names_of_rank(place, node):
            return 0
        if depth >= DEEPEST_NUMBER:
            return None
        key = (*_key(place, node), depth)
        if key not in self._distances:
            self._distances[key] = None  # what refers to itself says nothing
            below = [
                found
                for part, _ in _mentions(node, True)
                for at, expression in self.bound(place, part)
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


def names_of_rank(place: SourceLine, node: ast.AST) -> tuple[str, ...]:
    """What an expression names of the rank, or of the number of ranks, as it stands there."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if OF_THE_RANK.search(name.lower()) or _is_a_rank(place, name):
            return (ast.unparse(node),)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,) if OF_THE_RANK.search(node.value.lower()) else ()
    found: dict[str, None] = {}
    for child in ast.iter_child_nodes(node):
        found |= dict.fromkeys(names_of_rank(place, child))
    return tuple(found)


def _is_a_rank(place: SourceLine, name: str) -> bool:
    """True for an argument that is annotated as a rank."""
    given = place.function.args if place.function is not None else None
    return given is not None and any(
        one.arg == name and one.annotation is not None and "Rank" in ast.unparse(one.annotation)
        for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)
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
    if isinstance(node, ast.Call):
        name = called_name(node)
        if name in MAKING_INDICES:
            return node.args
        if name == "filter":
            return node.args[:1]
        if name in CHOOSING:
            keywords = [one.value for one in node.keywords]
            return [*node.args[_is_of_a_module(node.func) :], *keywords]
    return []


def _is_of_a_module(function: ast.expr) -> bool:
    """True for a function that gets the values as its first argument, unlike a method."""
    if not isinstance(function, ast.Attribute):
        return True
    base = function.value.id if isinstance(function.value, ast.Name) else ""
    return base in ("torch", "np", "numpy", "itertools", "data")


def _choosing_parts(source: Origin) -> list[ast.expr]:
    """The parts of an expression that say which values are taken, and compute positions for it."""
    parts = [part for node in ast.walk(source.expression) for part in _choosing(node)]
    return [*parts, source.expression] if source.chooses and source.computes else parts


def _guards(place: SourceLine, expression: ast.expr) -> Iterator[ast.expr]:
    """The conditions under which a function yields this expression, or puts it into a list."""
    statement = place.statement
    if not isinstance(statement, ast.Expr) or not isinstance(
        statement.value, (ast.Yield, ast.Call)
    ):
        return
    yield from (one.statement.test for one in place.around if isinstance(one.statement, ast.If))
    for loop in loops_around(place):
        for node in skipping(loop):
            at = place_of(place.file, node.lineno)
            if at is not None and node.lineno < statement.lineno:
                tests = [one.statement for one in at.around if isinstance(one.statement, ast.If)]
                yield from (one.test for one in tests[:1])


# The lines that made what a wrapper, a hook or a class of torch was given.

MOST_NAMES = 8
"""Through so many names an expression is followed to where it is made."""


def argument_of_line(line: CodeLine, names: Sequence[str]) -> list[Bound]:
    """What a call on this line gives by keyword for one of these arguments."""
    place = place_of(line.file, line.number)
    nodes = [place.statement, *inside(place.statement)] if place is not None else []
    return [
        (place, keyword.value)
        for node in nodes
        if isinstance(node, ast.Call) and place is not None
        for keyword in node.keywords
        if keyword.arg in names and node.lineno <= line.number <= (node.end_lineno or node.lineno)
    ]


def given_to_class(
    run: RunLines, kind: str, arguments: Sequence[str], name: str
) -> Iterator[Bound]:
    """What the calls that have run give a class of this name for one of its arguments."""
    for place, call in Bindings(run).calls():
        if called_name(call) == kind:
            value = argument_given(call, ["self", *arguments], name, constructs=True)
            if value is not None:
                yield place, value


def set_in_class(run: RunLines, kind: str, name: str) -> list[Bound]:
    """What the code of a class of this name sets an attribute to."""
    attribute = ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())
    found = Bindings(run).of_attribute(attribute)
    return [(place, value) for place, value in found if is_in_class(place.line(value), kind)]


def sole_origin(run: RunLines, bound: Bound) -> Bound | None:
    """The only expression that made a value, through names and functions of the user's; None if
    there are several.
    """
    sources = Sources(run)
    for _ in range(MOST_NAMES):
        given = sources.bound(*bound)
        if not given:
            return bound
        if len(given) != 1:
            return None
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


# What the user's code gives a name, an attribute or a call: the expressions that have run.

GOING_THROUGH = ("__iter__", "__getitem__", "__getitems__", "__next__", "__call__")
"""The methods by which an object gives what it holds."""

SEEDING = frozenset({"manual_seed", "seed"})
"""The methods that decide which random numbers an object gives."""

MOST_CALLS = 4
"""A function that is called at more places is not followed to its callers."""

Bound = tuple[SourceLine, ast.expr]
"""An expression, and where it stands."""


@dataclass(frozen=True)
class Bindings:
    """Looks names up in the source of what has run. A name may have been given several things."""

    run: RunLines

    @cached_property
    def _ran(self) -> frozenset[tuple[str, int]]:
        return frozenset((line.file, line.number) for line in self.run.times)

    def has_run(self, place: SourceLine | None) -> bool:
        """True if the statement has begun, or runs when the file is imported."""
        if place is None or place.function is None:
            return place is not None
        statement = place.statement
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        if isinstance(body, list) and body:
            last = max(first, body[0].lineno - 1)
        return any((place.file, number) in self._ran for number in range(first, last + 1))

    def of_name(self, place: SourceLine, name: str) -> list[Bound]:
        """What a variable was given, in its function or around it, or what its callers gave."""
        function = place.function
        while function is not None:
            found = list(self._set_in(place, inside(function), name))
            if found:
                return found
            if name in _arguments(function):
                return list(self._given(place, function, name))
            function = _enclosing(place.file, function.name, function.lineno)
            place = replace(place, function=function)
        tree = tree_of(place.file)
        return list(self._set_in(place, iter(tree.body), name)) if tree is not None else []

    def of_attribute(self, node: ast.Attribute) -> list[Bound]:
        """What an attribute of this name was set to, in any object, or what its property gives."""
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        if hasattr(Tensor, node.attr) and not is_own:
            return []
        found = [one for file in self.run.files for one in self._attribute_in(file, node.attr)]
        return found or [
            one for file in self.run.files for one in self._returned(file, node.attr, None)
        ]

    def of_call(self, node: ast.Call) -> list[Bound]:
        """What a function of the user's has returned or yielded, or what an object of it gives."""
        name = called_name(node)
        return [
            one
            for file in self.run.files
            for one in (
                *self._returned(file, name, None),
                *(
                    part
                    for owner in _classes(file)
                    if owner.name == name
                    for method in GOING_THROUGH
                    for part in self._returned(file, method, owner)
                ),
            )
        ]

    def _set_in(self, place: SourceLine, nodes: Iterator[ast.AST], name: str) -> Iterator[Bound]:
        for node in nodes:
            for target, value in _pairs(node):
                if _is_set(target, name):
                    at = place_of(place.file, value.lineno)
                    if at is not None and self.has_run(at):
                        yield at, _matching(target, value, name)

    def _given(self, place: SourceLine, function: Function, name: str) -> Iterator[Bound]:
        called = name_in_calls(place.file, function)
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        calls = [(at, call) for at, call in self.calls() if called_name(call) == called]
        for at, call in calls if len(calls) <= MOST_CALLS else ():
            value = argument_given(call, names, name, called != function.name)
            if value is not None:
                yield at, value

    def calls(self) -> Iterator[tuple[SourceLine, ast.Call]]:
        """All calls in the user's code that have run."""
        for file in self.run.files:
            yield from self._calls(file)

    def _calls(self, file: str) -> Iterator[tuple[SourceLine, ast.Call]]:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call):
                at = place_of(file, node.lineno)
                if at is not None and self.has_run(at):
                    yield at, node

    def _attribute_in(self, file: str, name: str) -> Iterator[Bound]:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            for target, value in _pairs(node):
                parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                if any(isinstance(one, ast.Attribute) and one.attr == name for one in parts):
                    at = place_of(file, value.lineno)
                    if at is not None and self.has_run(at):
                        yield at, value
        for owner in _classes(file):
            yield from self._field_of(file, owner, name)

    def _field_of(self, file: str, owner: ast.ClassDef, name: str) -> Iterator[Bound]:
        """What the field of a dataclass was given, also where it has a value of its own."""
        fields = [one for one in owner.body if isinstance(one, ast.AnnAssign)]
        names = [one.target.id if isinstance(one.target, ast.Name) else "" for one in fields]
        if name not in names:
            return
        value = fields[names.index(name)].value
        for at, call in self._calls(file):
            inside_it = owner.lineno <= call.lineno <= (owner.end_lineno or 0)
            if called_name(call) == owner.name or (called_name(call) == "cls" and inside_it):
                argument = argument_given(call, ["self", *names], name, constructs=True)
                if argument is not None:
                    yield at, argument
        default = place_of(file, value.lineno) if value is not None else None
        if default is not None and value is not None:
            yield default, value

    def _returned(self, file: str, name: str, owner: ast.ClassDef | None) -> Iterator[Bound]:
        tree = tree_of(file)
        body = owner.body if owner is not None else ast.walk(tree) if tree is not None else ()
        for function in body:
            if not isinstance(function, FUNCTIONS) or function.name != name:
                continue
            for node in inside(function):
                if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value:
                    at = place_of(file, node.value.lineno)
                    if at is not None and self.has_run(at):
                        yield at, node.value


def _arguments(function: Function) -> list[str]:
    given_by = function.args
    return [one.arg for one in (*given_by.posonlyargs, *given_by.args, *given_by.kwonlyargs)]


@lru_cache(maxsize=256)
def _enclosing(file: str, name: str, number: int) -> Function | None:
    """The function around another one; None if there is none."""
    tree = tree_of(file)
    around = [
        one
        for one in (ast.walk(tree) if tree is not None else ())
        if isinstance(one, FUNCTIONS)
        and one.lineno < number <= (one.end_lineno or 0)
        and (one.name, one.lineno) != (name, number)
    ]
    return max(around, key=lambda one: one.lineno, default=None)


@lru_cache(maxsize=64)
def _classes(file: str) -> tuple[ast.ClassDef, ...]:
    tree = tree_of(file)
    nodes = ast.walk(tree) if tree is not None else ()
    return tuple(one for one in nodes if isinstance(one, ast.ClassDef))


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a node of the syntax tree sets, and to what."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.target, node.iter
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield item.optional_vars, item.context_expr
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and function.attr in FILLING | SEEDING:
            yield from ((function.value, one) for one in node.value.args)


def _is_set(target: ast.expr, name: str) -> bool:
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(_is_set(one, name) for one in target.elts)
    return isinstance(target, ast.Name) and target.id == name


def _matching(target: ast.expr, value: ast.expr, name: str) -> ast.expr:
    """The part of a value that a name gets, where several names get one each."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, part in zip(target.elts, value.elts, strict=False):
            if _is_set(one, name):
                return part
    return value


# The lines that put the tensors of a collective into the list that its loop goes through.

PUTTING = frozenset({"append", "add", "extend", "update", "insert", "appendleft"})


def lines_that_put_into(view: View, place: CallSite) -> list[PointedLine]:
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
        for node in _calls_in(file):
            function = node.func
            if not isinstance(function, ast.Attribute) or function.attr not in PUTTING:
                continue
            line = line_in_function(file, node.lineno)
            if _name(function.value) == name and line is not None and run.times.get(line):
                found[line] = None
    return list(found)


def _calls_in(file: str) -> Iterator[ast.Call]:
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
