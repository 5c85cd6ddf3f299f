"""Patterns of code with holes: where they match in a syntax tree, and what they make of it.

A pattern is written as Python with holes: ``$x`` stands for one expression, statement, attribute or
keyword, and ``*$x`` or ``**$x`` for any number of arguments or statements. ``_[...]`` is an index
alone. A hole whose name is one of ``KINDS`` takes only what that function allows, and one
whose name begins with ``maybe`` takes nothing as well. A hole that only the replacement has is
filled by the function of this name in ``CHOICES``, once for each text that it gives.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from ddp_equivalence.diagnosis.repairs.source import Site

Found = Mapping[str, Any]
"""What stands in each hole: a node, a list of nodes, or the text of an attribute."""

KINDS: dict[str, Callable[[Site, Any, Found], bool]] = {}
CHOICES: dict[str, Callable[[Site, Found], Iterable[str]]] = {}

_HOLE = "__"
_REST = ast.parse(f"*{_HOLE}rest").body


def kind(test: Callable[[Site, Any, Found], bool]) -> Callable[[Site, Any, Found], bool]:
    """Registers a function as the test of the holes that have its name."""
    return KINDS.setdefault(test.__name__, test)


def choice(texts: Callable[[Site, Found], Iterable[str]]) -> Callable[[Site, Found], Iterable[str]]:
    """Registers a function that gives the texts for the holes that have its name."""
    return CHOICES.setdefault(texts.__name__, texts)


class Pattern:
    """Code ``before``, and what may stand ``after`` in its place."""

    def __init__(self, before: str, *after: str) -> None:
        texts = [re.sub(r"\$(\w+)", rf"{_HOLE}\1", text) for text in (before, *after)]
        trees: list[list[ast.AST]] = [[*ast.parse(text).body] for text in texts]
        self.are_statements = any(
            len(tree) != 1 or not isinstance(tree[0], ast.Expr) for tree in trees
        )
        trees = trees if self.are_statements else [_expression(tree) for tree in trees]
        self._before, self._after = trees[0], trees[1:]
        first = self._before[0]
        anything = _hole(first.value if isinstance(first, ast.Expr) else first)
        holes = {_hole(text) for tree in self._after for text in _texts(tree)}
        self.choices = holes - {""} - {_hole(text) for text in _texts(self._before)}
        self.root = (ast.stmt if self.are_statements else ast.expr) if anything else type(first)

    def changes(self, site: Site) -> Iterator[tuple[Sequence[ast.AST], str]]:
        """The nodes, beginning with that of the site, that are replaced, and by which text."""
        nodes, before = [site.node], self._before
        if self.are_statements:
            nodes, before = site.source.from_here_on(site.node), [*before, *_REST]
        for found in _sequence(site, before, nodes, {}):
            replaced = nodes[: len(nodes) - len(found.get("rest", ()))]
            for after in self._after:
                for chosen in self._chosen(site, after, found):
                    new = _filled([*after], {**found, **chosen})
                    yield replaced, "\n".join(map(ast.unparse, new))

    def _chosen(
        self, site: Site, after: Sequence[ast.AST], found: Found
    ) -> Iterator[dict[str, Any]]:
        """Each way to fill the holes that only the replacement has."""
        names = sorted(self.choices.intersection(map(_hole, _texts(after))))
        texts = {name: dict.fromkeys(CHOICES[name](site, found)) for name in names}
        for chosen in product(*texts.values()):
            with suppress(SyntaxError):  # such as a text with quotes, put into an f-string
                expressions = [ast.parse(text, mode="eval").body for text in chosen]
                yield dict(zip(texts, expressions, strict=True))


def _texts(trees: Sequence[ast.AST]) -> Iterator[object]:
    """The names, attributes and keywords in some trees."""
    for node in (one for tree in trees for one in ast.walk(tree)):
        yield from (getattr(node, field, None) for field in ("id", "attr", "arg"))


def _expression(tree: list[ast.AST]) -> list[ast.AST]:
    match tree:
        case [ast.Expr(value=ast.Subscript(value=ast.Name(id="_"), slice=index))]:
            return [index]
        case [ast.Expr(value=value)]:
            return [value]
    raise AssertionError(ast.dump(tree[0]))


def _hole(pattern: object) -> str:
    """The name of the hole that a pattern is; "" for other patterns."""
    name = pattern.id if isinstance(pattern, ast.Name) else pattern
    return name.removeprefix(_HOLE) if isinstance(name, str) and name.startswith(_HOLE) else ""


def _hole_of_many(pattern: object) -> str:
    """The same for a hole that stands for a list."""
    match pattern:
        case ast.Starred(value=hole) | ast.Expr(value=ast.Starred(value=hole)):
            return _hole(hole)
        case ast.keyword(arg=None, value=hole):
            return _hole(hole)
    return ""


def _matches(site: Site, pattern: Any, node: Any, found: Found) -> Iterator[Found]:
    match pattern:
        case ast.Expr(value=value) if hole := _hole(value):
            yield from _bound(site, hole, node, found)
        case ast.Name() | str() if hole := _hole(pattern):
            yield from _bound(site, hole, node, found)
        case list() if isinstance(node, list):
            yield from _sequence(site, pattern, node, found)
        case ast.AST() if type(pattern) is type(node):
            names = [name for name in pattern._fields if name not in ("ctx", "kind")]
            yield from _fields(site, pattern, node, names, found)
        case _ if type(pattern) is type(node) and pattern == node:
            yield found


def _fields(
    site: Site, pattern: ast.AST, node: ast.AST, names: list[str], found: Found
) -> Iterator[Found]:
    if not names:
        yield found
        return
    first, *others = names
    for one in _matches(site, getattr(pattern, first, None), getattr(node, first, None), found):
        yield from _fields(site, pattern, node, others, one)


def _sequence(
    site: Site, patterns: Sequence[Any], nodes: Sequence[Any], found: Found
) -> Iterator[Found]:
    if not patterns:
        if not nodes:
            yield found
        return
    first, *others = patterns
    pairs: Iterable[tuple[Found, Sequence[Any]]] = ()
    if hole := _hole_of_many(first):
        lengths = range(len(nodes) + 1) if others else [len(nodes)]
        pairs = ((one, nodes[n:]) for n in lengths for one in _bound(site, hole, nodes[:n], found))
    elif nodes:
        pairs = ((one, nodes[1:]) for one in _matches(site, first, nodes[0], found))
    for one, left in pairs:
        yield from _sequence(site, others, left, one)


def _bound(site: Site, hole: str, node: Any, found: Found) -> Iterator[Found]:
    if isinstance(node, ast.Starred) or (node is None and not hole.startswith("maybe")):
        return
    if hole in found:
        if ast.unparse(found[hole]) == ast.unparse(node):  # one may be stored, the other read
            yield found
        return
    test = KINDS.get(hole)
    if test is None or test(site, node, found):
        yield {**found, hole: node}


def same(one: Any, other: Any) -> bool:
    """True for two syntax trees, or lists of them, that were written alike."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, ast.AST) and isinstance(other, ast.AST):
        return ast.dump(one) == ast.dump(other)
    return type(one) is type(other) and bool(one == other)


def _filled(template: Any, found: Found) -> Any:
    """A template with what was found in its holes."""
    match template:
        case list():
            return [part for one in template for part in _parts(one, found)]
        case str() if hole := _hole(template):
            return found[hole] if isinstance(found[hole], str) else ast.unparse(found[hole])
        case ast.Name() if hole := _hole(template):
            return ast.Name(found[hole]) if isinstance(found[hole], str) else found[hole]
        case ast.AST():
            fields = ast.iter_fields(template)
            filled = type(template)(**{name: _filled(one, found) for name, one in fields})
            return ast.copy_location(filled, template)
    return template


def _parts(template: Any, found: Found) -> list[Any]:
    if hole := _hole_of_many(template):
        return list(found[hole])
    statement = found.get(_hole(getattr(template, "value", None)))
    if isinstance(template, ast.Expr) and isinstance(statement, ast.stmt):
        return [statement]
    return [_filled(template, found)]
