"""How the user's file can add up a number over all ranks, and which of its functions do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import Generic, TypeVar

from ddp_equivalence.case.edit import EditKind
from ddp_equivalence.diagnosis.repairs.source import (
    FileFacts,
    Scope,
    SourceFile,
    are_needed,
    closed,
)

COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"}
FRESH_NAMES = ("count", "number", "count_of_all", "number_of_all")
MEANS = {"mean", "average", "averaged", "avg"}


def reducers(place: EditSite, node: ast.AST) -> list[str]:
    """The functions of the file, as they are called at a node, that reduce over ranks."""
    found = _names_of_reducers(place.source)
    if not found:
        return []
    return [name for name in place.facts.functions_at(node) if name.rpartition(".")[2] in found]


def is_reducer(call: ast.Call, place: EditSite) -> bool:
    """True for a call that gives the sum or mean over ranks of what it is given.

    What is called is a function of the file, or one of torch that returns what it computes.
    """
    name = place.called_name(call)
    if name in COLLECTIVES:
        return not isinstance(place.parent(call), ast.Expr)
    is_of_a_module = place.text(call.func).split(".")[0] in place.facts.modules
    return name in _names_of_reducers(place.source) and not is_of_a_module


def is_mean(call: ast.Call, place: EditSite) -> bool:
    """True for a call of a function whose name says that it gives a mean."""
    return bool(set(place.called_name(call).strip("_").split("_")) & MEANS)


def reduces(statement: ast.stmt, name: str, place: EditSite) -> bool:
    """True for a statement that reduces a local variable in place."""
    for node in ast.walk(statement):
        match node:
            case ast.Call(args=[ast.Name(id=given), *_]) if given == name:
                called = place.called_name(node)
                if called == "all_reduce" or called in _names_of_reducers(place.source):
                    return True
            case _:
                pass
    return False


def total_of(number: str, node: ast.AST, place: EditSite, counted: str = "") -> str | None:
    """An expression with a number of this rank, added up over all ranks.

    ``counted``: what the number is the length of, for a function of the file that counts.

    A function of the file is used where there is one: it may know what to do without ranks.
    """
    tensor = place.facts.imported_as("torch.tensor")
    if tensor is None:
        return None
    fresh = f"{tensor}({number})"
    needed = place.facts.functions_at(node)
    bodies = _functions(place.source)
    for function in reducers(place, node):
        body = bodies[function.rpartition(".")[2]]
        if needed[function] == 1 and _only_adds(body):
            counts = counted and _calls(body) & {"len", "numel", "size"}
            return f"{function}({counted if counts else fresh})"
    if place.facts.all_reduce is None:
        return None
    name = next((one for one in FRESH_NAMES if one not in place.scope.names), "n")
    return f"({name} := {fresh}, {place.facts.all_reduce}({name}))[0]"


@lru_cache(maxsize=8)
def _names_of_reducers(source: SourceFile) -> frozenset[str]:
    """The functions that call a collective, or one that does, and return something."""
    bodies = {
        name: one
        for name, one in _functions(source).items()
        if any(isinstance(node, ast.Return) and node.value for node in ast.walk(one))
    }
    found = {name for name, one in bodies.items() if _calls(one) & COLLECTIVES}
    found |= {name for name, one in bodies.items() if len(one.body) == 1 and _calls(one) & found}
    return frozenset(found - {"forward", "__call__", "backward", "step", "__init__"})


@lru_cache(maxsize=8)
def _functions(source: SourceFile) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)}


def _calls(function: ast.FunctionDef) -> set[str]:
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                found.add(name)
            case _:
                pass
    return found


def _only_adds(function: ast.FunctionDef) -> bool:
    """True for a function that calls all_reduce, and divides nothing."""
    divides = any(
        isinstance(node, ast.Div) or (isinstance(node, ast.keyword) and node.arg == "op")
        for node in ast.walk(function)
    )
    return "all_reduce" in _calls(function) and not divides and "div_" not in _calls(function)


# A change of some bytes that a rule proposes, and the place of the node that it is for.

# What stands before the parenthesis of a call, or the keyword before an expression.
_LAST_WORD = re.compile(r"(?:\w+|[])}\"'])[ \t]*\Z")

# Attributes of tensors, modules and ranks that are no tensors.
NUMBERS = {
    *("shape", "dtype", "device", "ndim", "training", "requires_grad", "is_sparse"),
    *("rank", "local_rank", "node", "world_size", "local_world_size", "nodes"),
}


@dataclass(frozen=True)
class Change:
    """The bytes from ``start`` to ``end`` become ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class EditSite:
    """Where a node stands: its file, the names that it can use, and the nodes around it."""

    source: SourceFile
    facts: FileFacts
    scope: Scope

    def text(self, node: ast.AST) -> str:
        """The text of a node as the user has written it."""
        return self.source.text(node)

    def parent(self, node: ast.AST) -> ast.AST:
        """The node directly around a node."""
        return self.source.parents[node]

    def is_called(self, node: ast.AST) -> bool:
        """True for the ``f`` of ``f(x)``."""
        parent = self.parent(node)
        return isinstance(parent, ast.Call) and parent.func is node

    def called_name(self, node: ast.Call) -> str:
        """The name of what is called, without what stands before it."""
        match node.func:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return name
            case _:
                return ""

    def closed(self, node: ast.expr) -> str:
        """The text of an expression, so that it can get an attribute or an index."""
        return closed(self.text(node))

    def new_line(self, like: ast.stmt) -> str:
        """What begins a new line with the indentation of a statement."""
        return self.source.line_end() + (self.source.indentation(like) or "")

    def may_be_tensor(self, node: ast.expr) -> bool:
        """False where the source, or a run, shows that a value is no tensor.

        Calls and operations have no description, and may be tensors.
        """
        match node:
            case ast.Name(id=name):
                return name in self.scope.names and self.scope.may_be_tensor(name)
            case ast.Attribute():
                text = self.text(node)
                return (
                    text.split(".")[0] not in self.facts.modules
                    and node.attr not in NUMBERS
                    and self.scope.may_be_tensor(text)
                )
            case ast.Call() | ast.BinOp() | ast.Subscript() | ast.Tuple():
                return True
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.may_be_tensor(operand)
            case _:
                return False

    def world_size(self) -> str | None:
        """How the world size can be written here, with what the file has imported.

        Only if it imports nothing for that, a rank that the function is given is asked.
        """
        return self.facts.world_size or self._of_rank("world_size")

    def rank(self) -> str | None:
        """How the number of this rank can be written here."""
        return self._of_rank("rank") or self.facts.get_rank

    def _of_rank(self, number: str) -> str | None:
        if "rank" in self.scope.parameters and "rank" in self.facts.attributes:
            return f"rank.{number}" if "int" not in self.scope.description("rank") else None
        own = self.facts.owner_of_self(self.scope.function)
        if f"{own}.rank" in self.facts.attributes:
            return f"self.rank.{number}"
        return f"self.{number}" if number in self.facts.attributes.get(own, []) else None

    def renamed(self, node: ast.Attribute, name: str) -> Change:
        """Another attribute of the same object."""
        end = self.source.span(node)[1]
        return Change(end - len(node.attr.encode()), end, name)

    def first_line(self, node: ast.AST) -> int:
        """The line on which the statement around a node begins."""
        around = [one for one in (node, *self.source.parents_of(node)) if isinstance(one, ast.stmt)]
        return around[0].lineno

    def is_bound_elsewhere(self, name: str, statement: ast.stmt) -> bool:
        """True if a name of the function has a value without this statement."""
        inside = set(map(id, ast.walk(statement)))
        return name in self.scope.parameters or any(
            isinstance(one, ast.Name)
            and one.id == name
            and isinstance(one.ctx, ast.Store)
            and id(one) not in inside
            for one in ast.walk(self.scope.function)
        )

    def replaced(self, node: ast.expr, text: str) -> Change:
        """Another expression in place of a node, in parentheses where they are needed.

        Parentheses that the node has, and the new expression does not need, are replaced too.
        """
        start, end = self.source.span(node)
        if are_needed(text, self.parent(node), node):
            return Change(start, end, text if self._has_parentheses(start, end) else f"({text})")
        if self._has_parentheses(start, end) and not self._touches_words(start - 1, end + 1):
            return Change(start - 1, end + 1, text)
        return Change(start, end, text)

    def _has_parentheses(self, start: int, end: int) -> bool:
        """True if parentheses stand directly around some bytes, which are not those of a call."""
        raw = self.source.raw
        if raw[start - 1 : start] != b"(" or raw[end : end + 1] != b")":
            return False
        before = _LAST_WORD.search(raw[: start - 1].decode())
        return before is None or iskeyword(before[0].strip())

    def _touches_words(self, start: int, end: int) -> bool:
        """True if a name or number would grow together with what stands directly beside it."""
        raw = self.source.raw
        return raw[start - 1 : start].isalnum() or raw[end : end + 1].isalnum()

    def rewritten(self, statement: ast.stmt, text: str) -> Change:
        """Other text in place of a whole statement."""
        return Change(*self.source.span(statement), text)

    def followed_by(self, statement: ast.stmt, text: str) -> Change:
        """A simple statement with another one behind it."""
        return self.rewritten(statement, f"{self.text(statement)}; {text}")


NodeT = TypeVar("NodeT", bound=ast.AST)


@dataclass(frozen=True)
class Rule(Generic[NodeT]):
    """One kind of edit: for which nodes it is tried, and the function that proposes changes.

    The docstring of the function says why people make the mistake that this edit repairs.
    """

    kind: EditKind
    nodes: type[NodeT]
    changes: Callable[[NodeT, EditSite], Iterator[Change]]
