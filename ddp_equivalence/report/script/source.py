"""The text of a module, its statements by the names they bind, and edits in that text."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ddp_equivalence.report.script.names import Function, arguments, bound_by


@dataclass(frozen=True)
class Edit:
    """Bytes ``start`` to ``end`` of the text become ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Source:
    """What stands in one file, or in one cell of a notebook."""

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
        """Name -> the statements of the module that bind it."""
        found: dict[str, list[ast.stmt]] = {}
        for statement in self.tree.body:
            if not _is_type_checking(statement):
                for name in bound_by(statement):
                    found.setdefault(name, []).append(statement)
        return found

    @cached_property
    def type_only(self) -> set[str]:
        """Names that are bound under ``if TYPE_CHECKING``."""
        blocks = [one for one in self.tree.body if _is_type_checking(one)]
        return {name for block in blocks for name in bound_by(block)} - self.statements.keys()

    @cached_property
    def annotations_are_text(self) -> bool:
        """True if the module begins with ``from __future__ import annotations``."""
        return any(
            isinstance(one, ast.ImportFrom)
            and one.module == "__future__"
            and any(alias.name == "annotations" for alias in one.names)
            for one in self.tree.body
        )

    def at(self, line: int, column: int) -> int:
        """The place of a position as ast counts: lines from 1, columns in bytes from 0."""
        return self._line_starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """From where to where a node goes."""
        return (
            self.at(node.lineno, node.col_offset),
            self.at(node.end_lineno, node.end_col_offset),
        )

    def part(self, node: Any) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def whole_lines(self, node: ast.stmt) -> tuple[int, int]:
        """A statement's span with its decorators, the comment above it, and a docstring below."""
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        lines = self.text.splitlines()
        while first > 1 and lines[first - 2].strip().startswith("#"):
            first -= 1
        last = node.end_lineno or node.lineno
        body = self.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node in body[:-1]:
            after = body[body.index(node) + 1]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                last = after.end_lineno or last
        shared = [one for one in body if one is not node and one.lineno == node.lineno]
        if shared:  # a = 1; b = 2
            return self.span(node)
        return self._line_starts[first - 1], self._line_starts[min(last, len(lines))]

    def edited(self, span: tuple[int, int], edits: Sequence[Edit]) -> str:
        """The text in ``span`` with its edits; one inside another is left out."""
        start, end = span
        parts, here = [], start
        for edit in sorted(edits, key=lambda one: (one.start, -one.end)):
            if edit.start < here or edit.end > end:
                continue
            parts += [self.bytes[here : edit.start], edit.text.encode()]
            here = edit.end
        return b"".join([*parts, self.bytes[here:end]]).decode()

    def without_annotations(self, function: Function) -> list[Edit]:
        """Edits that take the annotations out of a function's signature."""
        edits = []
        for one in arguments(function.args):
            if one.annotation is not None:
                start = self.span(one)[0] + len(one.arg.encode())
                edits.append(Edit(start, self.span(one.annotation)[1], ""))
        if function.returns is not None:
            start, end = self.span(function.returns)
            arrow = self.bytes.rindex(b"->", 0, start)
            edits.append(Edit(len(self.bytes[:arrow].rstrip()), end, ""))
        return edits

    def without_type(self, assignment: ast.AnnAssign) -> list[Edit]:
        """Edits that make ``name: type = value`` a plain assignment."""
        if assignment.value is None:
            return []
        end = self.span(assignment.target)[1]
        return [Edit(end, self.span(assignment.annotation)[1], "")]


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")


@lru_cache(maxsize=256)
def _parsed(file: str, text: str) -> Source:
    return Source(file, text)


def source_of(file: str, namespace: dict[str, Any]) -> Source | None:
    """The text of a file, or of a notebook's cell; None if there is none."""
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file, namespace))
    if not text:
        return None
    source = _parsed(file, text)
    try:
        return source if source.tree else None
    except SyntaxError:
        return None
