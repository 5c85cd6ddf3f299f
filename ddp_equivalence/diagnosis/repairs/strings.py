"""Which strings of a file can stand for each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator


class Strings:
    """The strings of a file by where they are used: two that share a use can be exchanged."""

    def __init__(self, tree: ast.AST) -> None:
        self._by_use: dict[str, list[str]] = defaultdict(list)
        self._uses: dict[ast.AST, list[str]] = defaultdict(list)
        for node in ast.walk(tree):
            for use, part in _uses(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    self._uses[part].append(use)
                    if part.value not in self._by_use[use]:
                        self._by_use[use].append(part.value)

    def exchangeable(self, node: ast.Constant) -> list[str]:
        """The strings that are used as this one is."""
        return [text for use in self._uses.get(node, []) for text in self._by_use[use]]


def _uses(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each part of a node with a name for what it is used for."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            for position, argument in enumerate(node.args):
                yield f"{name}({position})", argument
            for keyword in node.keywords:
                yield f"{name}({keyword.arg})", keyword.value
                if isinstance(keyword.value, ast.Tuple | ast.List):
                    for one in keyword.value.elts:
                        yield f"{keyword.arg}=", one
        case ast.Subscript(slice=index):
            yield "key", index
        case ast.Dict():
            for key in node.keys:
                if key is not None:
                    yield "key", key
        case ast.Tuple() | ast.List() | ast.Set():
            for one in node.elts:
                yield f"display {id(node)}", one
                yield "member", one
        case ast.Compare():
            for one in (node.left, *node.comparators):
                yield "compared", one
