"""A change of some bytes that a rule proposes, and the place of the node that it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from keyword import iskeyword
from typing import Generic, TypeVar

from ddp_equivalence.case.edit import EditKind
from ddp_equivalence.diagnosis.repairs.file_facts import FileFacts
from ddp_equivalence.diagnosis.repairs.names_in_scope import Scope
from ddp_equivalence.diagnosis.repairs.parentheses import are_needed, closed
from ddp_equivalence.diagnosis.repairs.source import Source

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
class Place:
    """Where a node stands: its file, the names that it can use, and the nodes around it."""

    source: Source
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
    changes: Callable[[NodeT, Place], Iterator[Change]]
