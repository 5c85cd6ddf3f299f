"""The text of a module, its statements by the names they bind, and edits of that text."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ddp_equivalence.report.script.slicing.scopes import bound_names


@dataclass(frozen=True)
class Edit:
    """Replaces the bytes from ``start`` to ``end`` of a text by ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Source:
    """The text of one file, or of one cell of a notebook. All positions in it are bytes from 0."""

    file: str
    text: str

    @cached_property
    def bytes(self) -> bytes:
        return self.text.encode()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def statements(self) -> dict[str, list[ast.stmt]]:
        """Name -> the statements at the top level that bind it."""
        by_name: dict[str, list[ast.stmt]] = {}
        for statement in self.tree.body:
            if not _is_type_checking(statement):
                for name in bound_names(statement):
                    by_name.setdefault(name, []).append(statement)
        return by_name

    @cached_property
    def type_checking_names(self) -> set[str]:
        """The names that are bound under ``if TYPE_CHECKING`` only."""
        blocks = [statement for statement in self.tree.body if _is_type_checking(statement)]
        return {name for block in blocks for name in bound_names(block)} - self.statements.keys()

    @cached_property
    def postpones_annotations(self) -> bool:
        """True if the module begins with ``from __future__ import annotations``."""
        return any(
            isinstance(statement, ast.ImportFrom)
            and statement.module == "__future__"
            and any(alias.name == "annotations" for alias in statement.names)
            for statement in self.tree.body
        )

    def position(self, line: int, column: int) -> int:
        """The position for a line (from 1) and a column (in bytes from 0), as ast counts them."""
        return self._line_starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """The start and the end of a node."""
        return (
            self.position(node.lineno, node.col_offset),
            self.position(node.end_lineno, node.end_col_offset),
        )

    def text_of(self, node: Any) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def statement_span(self, node: ast.stmt) -> tuple[int, int]:
        """The lines of a statement, with its decorators, the comment above and a docstring below.

        A statement that shares its line with another has its own span only.
        """
        body = self.tree.body
        if any(other is not node and other.lineno == node.lineno for other in body):
            return self.span(node)  # a = 1; b = 2
        decorators = getattr(node, "decorator_list", ())
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        lines = self.text.splitlines()
        while first > 1 and lines[first - 2].strip().startswith("#"):
            first -= 1
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.Assign | ast.AnnAssign) and node in body[:-1]:
            after = body[body.index(node) + 1]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                last = after.end_lineno or last
        return self._line_starts[first - 1], self._line_starts[min(last, len(lines))]

    def edited(self, span: tuple[int, int], edits: Sequence[Edit]) -> str:
        """The text in ``span`` with the edits made; an edit inside another is left out."""
        start, end = span
        parts, position = [], start
        for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
            if edit.start < position or edit.end > end:
                continue
            parts += [self.bytes[position : edit.start], edit.text.encode()]
            position = edit.end
        return b"".join([*parts, self.bytes[position:end]]).decode()


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")


@lru_cache(maxsize=256)
def _cached(file: str, text: str) -> Source:
    return Source(file, text)


def source_of(file: str, namespace: dict[str, Any]) -> Source | None:
    """The source of a file or of a notebook's cell; None if there is none or it is not Python."""
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file, namespace))
    if not text:
        return None
    source = _cached(file, text)
    try:
        return source if source.tree else None
    except SyntaxError:
        return None
