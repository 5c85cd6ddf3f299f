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
        self._together: list[list[str]] = []
        for node in ast.walk(tree):
            self._together += _members(node)
            for use, part in _uses(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    self._uses[part].append(use)
                    if part.value not in self._by_use[use]:
                        self._by_use[use].append(part.value)

    def exchangeable(self, node: ast.Constant) -> list[str]:
        """The strings that are listed with this one, or used as this one is."""
        uses = self._uses.get(node, [])
        used = [text for use in uses for text in self._by_use[use]]
        beside = [text for texts in self._together if node.value in texts for text in texts]
        return [*beside, *used] if uses else []


def _members(node: ast.AST) -> Iterator[list[str]]:
    """The strings of a tuple, list or set, or the keys of a dict: names of things of one kind."""
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            pass
        case ast.Dict():
            parts = [key for key in node.keys if key is not None]
        case _:
            return
    texts = [one.value for one in parts if isinstance(one, ast.Constant)]
    if len(texts) > 1 and all(isinstance(text, str) for text in texts):
        yield [str(text) for text in texts]


def _uses(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each part of a node with a name for what it is used for."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            for position, argument in enumerate(node.args):
                yield f"{name}({position})", argument
            for keyword in node.keywords:
                yield f"{name}({keyword.arg})", keyword.value
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=index):
            yield f"{name}[]", index
        case ast.Compare():
            for one in (node.left, *node.comparators):
                yield "compared", one
        case ast.Tuple() | ast.List() | ast.Set():
            for one in node.elts:
                yield "member", one
        case _:
            return
