"""Edits of what the parts of a batch, or the turns of a loop, count in a mean or a sum."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.parentheses import joined

MOST_FLAGS = 2


def share_of_a_turn(node: ast.expr, place: Place) -> Iterator[Change]:
    """A term that is the same in every turn of a loop is added in each of them."""
    match place.parent(node):
        case ast.BinOp(op=ast.Add(), left=left, right=right) if node in (left, right):
            pass
        case ast.Assign(targets=[ast.Name(id=name)]) if _is_added(name, place):
            pass
        case _:
            return
    loop = place.source.nearest(node, ast.For, ast.FunctionDef)
    if isinstance(loop, ast.For) and place.may_be_tensor(node):
        own = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        lists = [one.id for one in ast.walk(loop.iter) if isinstance(one, ast.Name)]
        of_scope = [one for one in lists if one in place.scope.names]
        if of_scope and not own & used:
            yield place.replaced(node, joined(place.text(node), "/", f"len({of_scope[0]})"))


def _is_added(name: str, place: Place) -> bool:
    return any(
        isinstance(one, ast.BinOp)
        and isinstance(one.op, ast.Add)
        and name in (place.text(one.left), place.text(one.right))
        for one in ast.walk(place.scope.function)
    )


def only_if(node: ast.AugAssign, place: Place) -> Iterator[Change]:
    """What is only there to keep the ranks in step is counted as well."""
    if not isinstance(node.op, ast.Add):
        return
    flags = [name for name in place.scope.names if place.scope.description(name) == "bool"]
    target, value = place.text(node.target), place.text(node.value)
    for flag in flags[:MOST_FLAGS]:
        yield place.rewritten(node, f"{target} += 0 if {flag} else {value}")
        yield place.rewritten(node, f"{target} += {value} if {flag} else 0")
