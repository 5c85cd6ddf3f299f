"""Edits that add what was forgotten: an optional argument, the dot behind a prefix, a mask."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place

MOST_MASKS = 4
"""So many masks are tried for an expression."""


def optional_argument(node: ast.Call, place: Place) -> Iterator[Change]:
    """A function of the file has an option that this call needs, and it was not given."""
    # A truth value is given as the other one, and what is None by default as the local name that
    # is called like the parameter.
    function = _function(place.called_name(node), place)
    if function is None or any(one.arg is None for one in node.keywords):
        return
    end = place.source.span(node)[1] - 1
    before = ", " if node.args or node.keywords else ""
    given = {one.arg for one in node.keywords}
    for name, default in _options(function, len(node.args)):
        if name in given or not isinstance(default, ast.Constant):
            continue
        if isinstance(default.value, bool):
            yield Change(end, end, f"{before}{name}={not default.value}")
        elif default.value is None and name in place.scope.names:
            yield Change(end, end, f"{before}{name}={name}")


def _function(name: str, place: Place) -> ast.FunctionDef | None:
    """The only function or method of the file with this name, or the ``__init__`` of a class."""
    found = [
        one
        for one in ast.walk(place.source.tree)
        if isinstance(one, ast.FunctionDef) and one.name == name and name
    ]
    for one in place.source.tree.body:
        if isinstance(one, ast.ClassDef) and one.name == name:
            found += [
                method
                for method in one.body
                if isinstance(method, ast.FunctionDef) and method.name == "__init__"
            ]
    return found[0] if len(found) == 1 else None


def _options(function: ast.FunctionDef, positional: int) -> Iterator[tuple[str, ast.expr]]:
    """The parameters with defaults that so many positional arguments do not reach."""
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    skipped = 1 if names[:1] in (["self"], ["cls"]) else 0
    defaults = zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True)
    for name, default in defaults:
        if names.index(name) - skipped >= positional:
            yield name, default
    for one, other in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if other is not None:
            yield one.arg, other


def dot_behind_a_prefix(node: ast.Call, place: Place) -> Iterator[Change]:
    """``layers.1`` is also the beginning of ``layers.10``, and ``item`` that of ``item_text``."""
    match node:
        case ast.Call(func=ast.Attribute(attr="startswith"), args=[prefix], keywords=[]):
            text = place.text(prefix)
            match prefix:
                case ast.Constant(value=str(value)):
                    yield place.replaced(prefix, repr(f"{value}."))
                case ast.Tuple(elts=parts):
                    words = [one.value for one in parts if isinstance(one, ast.Constant)]
                    dotted = tuple(f"{word}." for word in words if isinstance(word, str))
                    if len(dotted) == len(parts):
                        yield place.replaced(prefix, repr(dotted))
                case _:
                    yield place.replaced(prefix, f'f"{{{text}}}."' if '"' not in text else text)
                    yield place.replaced(prefix, f'tuple(f"{{one}}." for one in {text})')


def masked_too(node: ast.expr, place: Place) -> Iterator[Change]:
    """Several masks say what counts, and one of them was forgotten."""
    # The other one is an attribute of the same object, or a name of the same shape.
    if not isinstance(place.parent(node), ast.Assign | ast.Subscript | ast.BinOp):
        return
    if isinstance(node, ast.Attribute) and not place.is_called(node):
        owner = place.text(node.value)
        if owner == "self" or owner in place.facts.modules:
            return
        others = place.facts.attributes.get(place.facts.owner(node.value), [])
        for other in [one for one in others if one != node.attr][:MOST_MASKS]:
            yield place.replaced(node, f"{place.text(node)} & {owner}.{other}")
    elif isinstance(node, ast.Name):
        shape = place.scope.description(node.id).removeprefix("tensor ")
        kind, _, sizes = shape.partition(" ")
        masks = [
            name
            for name in place.scope.names_before(node.lineno, node.id)
            if name != node.id and place.scope.description(name) == f"tensor bool {sizes}"
        ]
        for mask in masks[:MOST_MASKS] if sizes else []:
            yield place.replaced(node, f"{node.id} {'&' if kind == 'bool' else '*'} {mask}")
