"""The text of a user's file with its syntax tree, and where in its bytes each node stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|$)")


class Source:
    """One file. ``text`` is its bytes decoded as utf-8, with the line ends as they are."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.raw = text.encode()
        mark = "\ufeff"  # a byte order mark is part of the bytes, and of no line
        self._starts = _starts_of_lines(self.raw, len(mark.encode()) * text.startswith(mark))
        self.tree = ast.parse(text.removeprefix(mark))
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of the file in which a node with a position stands."""
        line, column = getattr(node, "lineno"), getattr(node, "col_offset")  # noqa: B009
        last, end = getattr(node, "end_lineno"), getattr(node, "end_col_offset")  # noqa: B009
        return self._starts[line - 1] + column, self._starts[last - 1] + end

    def between(self, start: int, end: int) -> str:
        """The text of some bytes."""
        return self.raw[start:end].decode()

    def text(self, node: ast.AST) -> str:
        """The text of a node as the user has written it."""
        return self.between(*self.span(node))

    def indentation(self, node: ast.AST) -> str | None:
        """The white space before a node; None if something else stands before it on its line."""
        start = self._starts[getattr(node, "lineno") - 1]  # noqa: B009
        before = self.between(start, self.span(node)[0])
        return before if not before.strip() else None

    def line_end(self) -> str:
        """How the file ends its lines."""
        first = _LINE.match(self.raw)
        return "\r\n" if first and first[0].endswith(b"\r\n") else "\n"

    def parents_of(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements of the block in which a statement stands."""
        for _, field in ast.iter_fields(self.parents[statement]):
            if isinstance(field, list) and any(one is statement for one in field):
                return field
        return [statement]

    def index_in_block(self, statement: ast.stmt) -> int:
        """The number of a statement in its block, from 0."""
        return next(i for i, one in enumerate(self.block_of(statement)) if one is statement)

    def nearest(self, node: ast.AST, *kinds: type[Node]) -> Node | None:
        """The innermost node of these kinds around a node."""
        for parent in self.parents_of(node):
            if isinstance(parent, kinds):
                return parent
        return None


def _starts_of_lines(raw: bytes, first: int) -> list[int]:
    """Where each line begins. Only what ends a line for Python counts: a form feed does not."""
    starts = [match.start() for match in _LINE.finditer(raw)]
    return [first, *starts[1:]]
