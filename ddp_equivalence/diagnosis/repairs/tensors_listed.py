"""Edits of lists of parameters: each of them once, and those of all groups."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place

REDUCING = {"all_reduce", "div_", "mul_", "reduce", "broadcast", "register_hook"}


def of_all_groups(node: ast.Subscript, place: Place) -> Iterator[Change]:
    """An optimizer has several groups of parameters, and only the first one is read."""
    match node:
        case ast.Subscript(
            value=ast.Subscript(value=groups, slice=ast.Constant(value=0)),
            slice=ast.Constant(value=str()) as key,
        ):
            of_one = f"group[{place.text(key)}]"
            each = f"[one for group in {place.text(groups)} for one in {of_one}]"
            yield place.replaced(node, each)
        case _:
            return


def each_once(node: ast.For, place: Place) -> Iterator[Change]:
    """A tied parameter is listed twice, and so it is reduced or divided twice."""
    if not isinstance(node.target, ast.Name) or not isinstance(
        node.iter, ast.Call | ast.Attribute | ast.Name
    ):
        return
    name = node.target.id
    for one in ast.walk(node):
        match one:
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called)):
                if called in REDUCING and f"{name}.grad" in place.text(one):
                    yield place.replaced(node.iter, f"dict.fromkeys({place.text(node.iter)})")
                    return
            case ast.AugAssign(target=ast.Attribute(value=ast.Name(id=owner), attr="grad")):
                if owner == name:
                    yield place.replaced(node.iter, f"dict.fromkeys({place.text(node.iter)})")
                    return
            case _:
                pass
