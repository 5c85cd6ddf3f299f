"""Finds the line in the source of a module's class that assigns one of its buffers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from tokenize import TokenError
from typing import Any

from torch import nn

from ddp_equivalence.measurement.code_lines import is_users
from ddp_equivalence.observed_scripts.in_script.real_files import real_file
from ddp_equivalence.observed_scripts.places import Place

DATA = "data"
"""What is written to this attribute of a tensor is written to the tensor."""


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
    tree, file, first = _source(kind)
    found: dict[str, list[Place]] = {}
    for method in getattr(tree, "body", ()):
        if not isinstance(method, ast.FunctionDef) or method.name == "__init__":
            continue
        for node in ast.walk(method):
            for name in _written(node):
                number = first + getattr(node, "lineno", 1) - 1
                found.setdefault(name, []).append(Place(real_file(file), number, method.name))
    return found


def _source(kind: type[Any]) -> tuple[ast.AST | None, str, int]:
    """The class statement, its file, and its first line; None where that cannot be read."""
    try:
        file = inspect.getsourcefile(kind)
        if file is None or not is_users(file):
            return None, "", 0
        source, first = inspect.getsourcelines(kind)
        (tree,) = ast.parse(textwrap.dedent("".join(source))).body
    except (OSError, TypeError, SyntaxError, ValueError, TokenError):
        return None, "", 0  # such as a docstring that is indented less than its class
    return tree, file, first


def _written(node: ast.AST) -> list[str]:
    """The attributes of self that a statement, or a call of a method such as copy_, writes to."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = node.targets
        targets = [one for target in targets for one in _each(target)]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        in_place = node.func.attr.endswith("_") and not node.func.attr.endswith("__")
        targets = [node.func.value] if in_place else []
    else:
        return []
    return [name for target in targets if (name := _of_self(target)) is not None]


def _each(target: ast.expr) -> list[ast.expr]:
    """The targets of an assignment to several at once."""
    if isinstance(target, ast.Tuple | ast.List):
        return [one for element in target.elts for one in _each(element)]
    return [target]


def _is_data_of_a_tensor(node: ast.expr) -> bool:
    """True for ``self.center.data``, and not for ``self.data``, which may be a buffer itself."""
    if not isinstance(node, ast.Attribute) or node.attr != DATA:
        return False
    return not isinstance(node.value, ast.Name)


def _of_self(node: ast.expr) -> str | None:
    """``center`` for ``self.center``, ``self.center[0]``, ``self.center.data``; None for others."""
    while isinstance(node, ast.Subscript) or _is_data_of_a_tensor(node):
        assert isinstance(node, ast.Subscript | ast.Attribute)
        node = node.value
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return None
    return node.attr if node.value.id == "self" else None
