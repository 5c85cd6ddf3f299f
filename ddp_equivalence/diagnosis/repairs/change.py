"""A change of some bytes that a rule proposes, and where the node stands that it is proposed for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddp_equivalence.case.edit import EditKind
from ddp_equivalence.diagnosis.repairs.file_facts import FileFacts
from ddp_equivalence.diagnosis.repairs.names_in_scope import Scope
from ddp_equivalence.diagnosis.repairs.source import Source, is_closed

# Whatever stands in one of these places needs no parentheses.
_ROOMY = (
    ast.Assign,
    ast.AugAssign,
    ast.Return,
    ast.Expr,
    ast.Call,
    ast.keyword,
    ast.List,
    ast.If,
    ast.While,
)


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

    def operand(self, node: ast.expr) -> str:
        """The text of a node, in parentheses if it could fall apart in a larger expression."""
        return self.source.operand(node)

    def parent(self, node: ast.AST) -> ast.AST:
        """The node directly around a node."""
        return self.source.parents[node]

    def is_called(self, node: ast.AST) -> bool:
        """True for the ``f`` of ``f(x)``."""
        parent = self.parent(node)
        return isinstance(parent, ast.Call) and parent.func is node

    def replaced(self, node: ast.expr, text: str) -> Change:
        """Another expression in place of a node, in parentheses where they are needed."""
        start, end = self.source.span(node)
        if self._needs_parentheses(node, text):
            text = f"({text})"
        return Change(start, end, text)

    def _needs_parentheses(self, node: ast.expr, text: str) -> bool:
        try:
            new = ast.parse(text, mode="eval").body
        except SyntaxError:
            return "\n" in text
        parent = self.parent(node)
        roomy = isinstance(parent, _ROOMY) and not self.is_called(node) and "\n" not in text
        if is_closed(new, text) or roomy:
            return False
        start, end = self.source.span(node)
        before = self.source.raw[:start].rstrip()
        after = self.source.raw[end:].lstrip()
        return not (before.endswith(b"(") and after.startswith(b")"))

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
