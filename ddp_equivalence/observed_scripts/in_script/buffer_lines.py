"""Finds the line in the source of a module's class that assigns one of its buffers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from torch import nn

from ddp_equivalence.measurement.code_lines import is_users
from ddp_equivalence.observed_scripts.in_script.real_files import real_file
from ddp_equivalence.observed_scripts.places import Place


def line_that_assigns(module: nn.Module, buffer: str) -> Place | None:
    """The line that gives a buffer its value, outside of ``__init__``; None unless there is one
    such line, in the user's own code. ``buffer``: its name inside ``module``, with dots.
    """
    path, _, name = buffer.rpartition(".")
    try:
        owner: Any = module.get_submodule(path)
    except AttributeError:  # it is inside a wrapper, which has no part in the name
        return None
    kind = type(owner)
    if kind not in _known:
        _known[kind] = _lines_that_assign(kind)
    lines = _known[kind].get(name, [])
    return lines[0] if len(lines) == 1 else None


_known: dict[object, dict[str, list[Place]]] = {}


def _lines_that_assign(kind: type[Any]) -> dict[str, list[Place]]:
    """For each attribute of self, the lines that assign it, or write into it."""
    try:
        file = inspect.getsourcefile(kind)
        source, first = inspect.getsourcelines(kind)
    except (OSError, TypeError):  # a class without a file
        return {}
    if file is None or not is_users(file):
        return {}
    (tree,) = ast.parse(textwrap.dedent("".join(source))).body
    found: dict[str, list[Place]] = {}
    for method in getattr(tree, "body", ()):
        if not isinstance(method, ast.FunctionDef) or method.name == "__init__":
            continue
        for node in ast.walk(method):
            for name in _written(node):
                number = first + getattr(node, "lineno", 1) - 1
                found.setdefault(name, []).append(Place(real_file(file), number, method.name))
    return found


def _written(node: ast.AST) -> list[str]:
    """The attributes of self that a statement, or a call of a method such as copy_, writes to."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        in_place = node.func.attr.endswith("_") and not node.func.attr.endswith("__")
        targets = [node.func.value] if in_place else []
    else:
        return []
    return [name for target in targets if (name := _of_self(target)) is not None]


def _of_self(node: ast.expr) -> str | None:
    """``center`` for ``self.center`` and ``self.center[0]``; None for others."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return None
    return node.attr if node.value.id == "self" else None
