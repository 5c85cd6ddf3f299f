"""The one reader of the user's source: what stands around a line, and what ran."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
RETURNS = (ast.Return, ast.Yield, ast.YieldFrom)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

WITHOUT_CODE = (ast.AnnAssign, ast.Global, ast.Nonlocal)
"""Statements that may leave no code, so that no line of theirs ever runs."""


@dataclass(frozen=True)
class Around:
    """A statement around a line. ``branch``: the name of its part that holds the line, such as
    ``body`` or ``orelse``.
    """

    statement: ast.stmt
    branch: str


@dataclass(frozen=True)
class SourceLine:
    """Where a line stands. ``statement``: the innermost one that holds it. ``around``: what is
    around this in the same function, the innermost first. ``function``: None outside of functions.
    """

    file: str
    function: Function | None
    statement: ast.stmt
    around: tuple[Around, ...]

    def line(self, node: ast.AST) -> CodeLine:
        """The line at which a part of this function begins."""
        name = self.function.name if self.function is not None else "<module>"
        return CodeLine(self.file, getattr(node, "lineno", 0), name)

    @property
    def nodes(self) -> list[ast.AST]:
        """The statement, and everything in it that belongs to the same function."""
        return [self.statement, *inside(self.statement)]

    @property
    def value(self) -> ast.expr | None:
        """What the statement assigns, returns or evaluates; None if it does nothing of this."""
        value = getattr(self.statement, "value", None)
        return value if isinstance(value, ast.expr) else None

    @property
    def loops(self) -> list[Loop]:
        """The loops whose bodies hold the line, the innermost first."""
        return [
            one.statement
            for one in self.around
            if isinstance(one.statement, LOOPS) and one.branch == "body"
        ]


@lru_cache(maxsize=64)
def tree_of(file: str) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=64)
def nodes_in(file: str) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a file; () if it cannot be read."""
    tree = tree_of(file)
    return () if tree is None else tuple(ast.walk(tree))


def place_at(line: CodeLine) -> SourceLine | None:
    """Where a line stands; None if the file cannot be read, or if no statement holds the line."""
    return place_of(line.file, line.number)


@lru_cache(maxsize=4096)
def place_of(file: str, number: int) -> SourceLine | None:
    """Where the line with this number stands; None as in ``place_at``."""
    tree = tree_of(file)
    if tree is None:
        return None
    function: Function | None = None
    around: list[Around] = []
    statement: ast.stmt | None = None
    found = _holding(tree, number)
    while found is not None:
        branch, inner = found
        if statement is not None:
            around.append(Around(statement, branch))
        if isinstance(statement, FUNCTIONS):
            function, around = statement, []
        statement = inner
        found = _holding(inner, number)
    if statement is None or isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return None
    return SourceLine(file, function, statement, tuple(reversed(around)))


def _holding(node: ast.AST, number: int) -> tuple[str, ast.stmt] | None:
    """The part of a node, and the statement in it, that hold a line."""
    for branch, value in ast.iter_fields(node):
        for one in value if isinstance(value, list) else ():
            if isinstance(one, ast.stmt) and holds(one, number):
                return branch, one
            if isinstance(one, (ast.ExceptHandler, ast.match_case)):
                inner = _holding(one, number)
                if inner is not None:
                    return branch, inner[1]
    return None


def innermost_loop(way: Sequence[CodeLine]) -> CodeLine | None:
    """The first loop around one of the lines that led to a call; without one, the first line."""
    places = [place for line in way if (place := place_at(line)) is not None and place.loops]
    return next((place.line(place.loops[0]) for place in places), next(iter(way), None))


def holds(node: ast.stmt | ast.expr, number: int) -> bool:
    """True if a line is one of those that a node goes over."""
    return node.lineno <= number <= (node.end_lineno or node.lineno)


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in a statement that belongs to the same function."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield child
            yield from inside(child)


def leaving(loop: Loop) -> Iterator[ast.stmt]:
    """The statements that leave a loop before it is through."""
    yield from (one for one in inside(loop) if isinstance(one, ast.Return))
    yield from _of_this_loop(loop.body, ast.Break)


def _of_this_loop(body: Sequence[ast.AST], kind: type[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        if isinstance(one, kind):
            yield one
        elif not isinstance(one, (*LOOPS, *FUNCTIONS, ast.ClassDef, ast.expr)):
            yield from _of_this_loop(list(ast.iter_child_nodes(one)), kind)


def called_name(node: ast.AST) -> str:
    """The last part of the name of what a call calls; "" if it has none, or for no call."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def last_name(expression: ast.AST) -> str:
    """The name of a variable, or of the attribute at the end; "" for anything else."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def functions_named(file: str, name: str) -> list[Function]:
    """The functions and methods of this name in a file."""
    return [one for one in nodes_in(file) if isinstance(one, FUNCTIONS) and one.name == name]


def classes_in(file: str) -> list[ast.ClassDef]:
    """All classes in a file."""
    return [one for one in nodes_in(file) if isinstance(one, ast.ClassDef)]


@lru_cache(maxsize=64)
def modules_in(file: str) -> frozenset[str]:
    """The names under which a file imports modules."""
    imports = (one for one in nodes_in(file) if isinstance(one, ast.Import))
    return frozenset(one.asname or one.name for each in imports for one in each.names)


def is_in_class(line: CodeLine, name: str) -> bool:
    """True for a line that stands in a class of this name."""
    return any(one.name == name and holds(one, line.number) for one in classes_in(line.file))


def arguments_of(function: Function, keyword_only: bool = True) -> list[str]:
    """The names of a function's arguments, without those with stars."""
    of = function.args
    more = of.kwonlyargs if keyword_only else []
    return [one.arg for one in (*of.posonlyargs, *of.args, *more)]


def default_of(function: Function, name: str) -> ast.expr | None:
    """What an argument is without being given; None if it has to be given."""
    of = function.args
    listed = [*of.posonlyargs, *of.args]
    with_default = listed[len(listed) - len(of.defaults) :]
    given = dict(zip((one.arg for one in with_default), of.defaults, strict=True))
    of_keywords = zip((one.arg for one in of.kwonlyargs), of.kw_defaults, strict=True)
    return (given | dict(of_keywords)).get(name)


@dataclass(frozen=True)
class RunLines:
    """``times``: each line that has run -> how often it began, in all steps. ``last``: -> a number
    that says in which order they ran last. ``backwards``: the lines that called backward.
    """

    times: Mapping[CodeLine, int]
    last: Mapping[CodeLine, int]
    backwards: tuple[CodeLine, ...] = ()

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The files of the user's code that ran."""
        return tuple(dict.fromkeys(line.file for line in self.times))

    @cached_property
    def _numbers(self) -> frozenset[tuple[str, int]]:
        return frozenset((line.file, line.number) for line in self.times)

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        """The nodes of the syntax trees of all files that ran, with their files."""
        return ((file, node) for file in self.files for node in nodes_in(file))

    @property
    def begun(self) -> int:
        """When the last call of backward began."""
        return max((self.last.get(at, 0) for at in self.backwards), default=0)

    def has_run(self, place: SourceLine | None) -> bool:
        """True if the statement has begun, or runs when the file is imported."""
        if place is None or place.function is None:
            return place is not None
        statement = place.statement
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        if isinstance(body, list) and body:
            last = max(first, body[0].lineno - 1)
        return any((place.file, number) in self._numbers for number in range(first, last + 1))

    def count(self, place: SourceLine, node: ast.AST) -> int:
        """How often the line began at which a part of this function begins."""
        return self.times.get(place.line(node), 0)

    def exact_count(self, place: SourceLine, node: ast.AST) -> int | None:
        """The same number; None for a line that may begin several times in one run of the node.

        Python comes back to the first line of a statement that goes over several lines, of a
        ``with`` at its end, and, from 3.12 on, in comprehensions.
        """
        parts = [node.test] if isinstance(node, (ast.If, ast.While)) else [node]
        if isinstance(node, (ast.For, ast.AsyncFor)):
            parts = [node.target, node.iter]
        for part in parts:
            end = getattr(part, "end_lineno", None)
            if end != getattr(node, "lineno", 0) or isinstance(part, (ast.With, ast.AsyncWith)):
                return None
            if any(isinstance(one, COMPREHENSIONS) for one in ast.walk(part)):
                return None
        return self.count(place, node)

    def last_of(self, place: SourceLine, body: Sequence[ast.stmt]) -> int:
        """When a line of a block of this function ran last; 0 if none has."""
        first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        name = place.line(body[0]).function
        return max(
            (
                when
                for line, when in self.last.items()
                if line.file == place.file
                and line.function == name
                and first <= line.number <= last
            ),
            default=0,
        )

    def times_begun(self, place: SourceLine, body: Sequence[ast.stmt]) -> int | None:
        """How often a block of this function began; None if that is not certain."""
        first = body[0] if body else None
        while isinstance(first, (ast.With, ast.AsyncWith, ast.Try)):
            first = first.body[0]
        if first is None or isinstance(first, (*LOOPS, *WITHOUT_CODE)):
            return None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            return None
        return self.exact_count(place, first)


def run_lines(view: View, rank: int | None = None) -> RunLines:
    """The lines that a rank, or the lowest one, has run; none if they were not recorded."""
    seen = view.observed.by_rank.get(
        min(view.observed.by_rank, default=0) if rank is None else rank
    )
    if seen is None:
        return RunLines({}, {})
    backwards = tuple(place.line for place in view.observed.calls.backwards)
    return RunLines(seen.trace.times_run or {}, seen.trace.lines_run or {}, backwards)


def sets_constant(line: CodeLine) -> bool:
    """True if the line sets something to what is written there."""
    place = place_at(line)
    return place is not None and isinstance(getattr(place.statement, "value", None), ast.Constant)


def is_set_by(target: ast.expr, name: str) -> bool:
    """True if a target is this variable, an element of it, or one of several with it."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(is_set_by(one, name) for one in target.elts)
    return isinstance(target, ast.Name) and target.id == name


def is_attribute_of(target: ast.expr, name: str) -> bool:
    """True if a target is an attribute of this name, or one of several with it."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(is_attribute_of(one, name) for one in target.elts)
    return isinstance(target, ast.Attribute) and target.attr == name
