"""The user's source code as a syntax tree: what stands around a line, and what it consists of."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ddp_equivalence.measurement.calls import CodeLine

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True)
class Around:
    """A statement around a line. ``branch``: the name of its part that holds the line, such as
    ``body`` or ``orelse``.
    """

    statement: ast.stmt
    branch: str


@dataclass(frozen=True)
class Place:
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


@lru_cache(maxsize=64)
def tree_of(file: str) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=4096)
def place_of(file: str, number: int) -> Place | None:
    """Where a line stands; None if the file cannot be read, or if no statement holds the line."""
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
    return Place(file, function, statement, tuple(reversed(around)))


def _holding(node: ast.AST, number: int) -> tuple[str, ast.stmt] | None:
    """The part of a node, and the statement in it, that hold a line."""
    for branch, value in ast.iter_fields(node):
        for one in value if isinstance(value, list) else ():
            if isinstance(one, ast.stmt) and _holds(one, number):
                return branch, one
            if isinstance(one, (ast.ExceptHandler, ast.match_case)):
                inner = _holding(one, number)
                if inner is not None:
                    return branch, inner[1]
    return None


def _holds(node: ast.stmt, number: int) -> bool:
    return node.lineno <= number <= (node.end_lineno or node.lineno)


def loops_around(place: Place) -> Iterator[Loop]:
    """The loops whose bodies hold the line, the innermost first."""
    for one in place.around:
        if isinstance(one.statement, LOOPS) and one.branch == "body":
            yield one.statement


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


def skipping(loop: Loop) -> Iterator[ast.stmt]:
    """The statements that go on with the next pass of a loop."""
    yield from _of_this_loop(loop.body, ast.Continue)


def _of_this_loop(body: list[ast.stmt], kind: type[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        if isinstance(one, kind):
            yield one
        elif not isinstance(one, (*LOOPS, *FUNCTIONS, ast.ClassDef)):
            for _, value in ast.iter_fields(one):
                parts = value if isinstance(value, list) else []
                for part in parts:
                    if isinstance(part, ast.stmt):
                        yield from _of_this_loop([part], kind)
                    elif isinstance(part, (ast.ExceptHandler, ast.match_case)):
                        yield from _of_this_loop(part.body, kind)


def called_name(call: ast.Call) -> str:
    """The last part of the name of what is called; "" if it has none."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def functions_named(file: str, name: str) -> list[Function]:
    """The functions and methods of this name in a file."""
    tree = tree_of(file)
    nodes = ast.walk(tree) if tree is not None else ()
    return [one for one in nodes if isinstance(one, FUNCTIONS) and one.name == name]


def is_in_class(line: CodeLine, name: str) -> bool:
    """True for a line that stands in a class of this name."""
    tree = tree_of(line.file)
    return any(
        isinstance(one, ast.ClassDef) and one.name == name and _holds(one, line.number)
        for one in (ast.walk(tree) if tree is not None else ())
    )
