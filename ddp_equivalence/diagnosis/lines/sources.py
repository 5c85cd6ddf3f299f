"""Follows an expression of the user's code back to all expressions that it was made of."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ddp_equivalence.diagnosis.lines.bindings import Bindings, Bound
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import (
    Place,
    called_name,
    loops_around,
    place_of,
    skipping,
)
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
class Source:
    """An expression that another one was made of. ``chooses``: it does not hold the values, but
    says which of them are taken.
    """

    place: Place
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

    def of_line(self, line: CodeLine) -> list[Source]:
        """All expressions that what a line says was made of, the nearest first, with its own."""
        place = place_of(line.file, line.number)
        if place is None:
            return []
        return self.of([Source(place, one, False) for one in _heads(place.statement)])

    def of(self, begin: Sequence[Source]) -> list[Source]:
        """All expressions that these were made of, the nearest first, with these."""
        found: dict[tuple[str, int, int, int, bool], Source] = {}
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

    def _made_of(self, source: Source) -> Iterator[Source]:
        for node, chooses in _mentions(source.expression, source.chooses):
            for place, expression in self.bound(source.place, node):
                yield Source(place, expression, chooses)
                for test in _guards(place, expression):
                    yield Source(place, test, True)

    def bound(self, place: Place, node: ast.expr) -> list[Bound]:
        """What a name or an attribute was given, or what a call returned."""
        if isinstance(node, ast.Name):
            return self.bindings.of_name(place, node.id) if node.id != "self" else []
        if isinstance(node, ast.Attribute):
            return self.bindings.of_attribute(node)
        return self.bindings.of_call(node) if isinstance(node, ast.Call) else []

    def _distance(self, place: Place, node: ast.expr, depth: int = 0) -> int | None:
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


def names_of_rank(place: Place, node: ast.AST) -> tuple[str, ...]:
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


def _is_a_rank(place: Place, name: str) -> bool:
    """True for an argument that is annotated as a rank."""
    given = place.function.args if place.function is not None else None
    return given is not None and any(
        one.arg == name and one.annotation is not None and "Rank" in ast.unparse(one.annotation)
        for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)
    )


def _key(place: Place, node: ast.expr) -> tuple[str, int, int, int]:
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


def _choosing_parts(source: Source) -> list[ast.expr]:
    """The parts of an expression that say which values are taken, and compute positions for it."""
    parts = [part for node in ast.walk(source.expression) for part in _choosing(node)]
    return [*parts, source.expression] if source.chooses and source.computes else parts


def _guards(place: Place, expression: ast.expr) -> Iterator[ast.expr]:
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
