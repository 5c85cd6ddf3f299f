"""Leaves ``Rank.read``, which is for checks alone, out of a script whose step does not call it."""

from __future__ import annotations

import ast
from itertools import pairwise

from ddp_equivalence.ranks.rank import Rank

LISTENERS = "heard_by"
"""The variable beside the class that the method uses."""


def without_unused_read(script: str) -> str:
    """The script without the method and its listeners, unless something reads an attribute so."""
    tree = ast.parse(script)
    name = Rank.read.__name__
    if any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(tree)):
        return script
    lines = script.splitlines(keepends=True)
    for node, after in reversed([*pairwise(tree.body)]):
        if isinstance(node, ast.ClassDef) and node.name == Rank.__name__:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == name:
                    del lines[method.lineno - 2 : method.end_lineno]  # and the empty line above
        if _is_listeners(node):
            end = after if not _is_text(after) else tree.body[tree.body.index(after) + 1]
            del lines[node.lineno - 1 : _first_line(end) - 1]
    return "".join(lines)


def _is_listeners(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == LISTENERS


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.stmt) -> int:
    """The first line of a statement, or of its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
