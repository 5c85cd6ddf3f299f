"""Edits of what the parts of a batch, or the turns of a loop, count in a mean or a sum."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.parentheses import joined

MOST_FLAGS = 2


def weighed_by_size(node: ast.BinOp, place: Place) -> Iterator[Change]:
    """Parts of a batch count alike in its mean, though the last one has fewer examples."""
    loop = place.source.nearest(node, ast.For)
    match node, loop:
        case (
            ast.BinOp(left=value, op=ast.Div(), right=divisor),
            ast.For(target=target),
        ) if _is_number_of_parts(divisor, place):
            part = next((one.id for one in _stored(target)), None)
            wholes = [one for one in place.scope.parameters if one not in ("self", "model", "rank")]
            for whole in wholes[-1:]:
                for key in _keys(place, part, whole):
                    weight = f"len({part}{key}) / len({whole}{key})"
                    yield place.replaced(node, joined(place.text(value), "*", weight))
        case _:
            return


def _is_number_of_parts(node: ast.expr, place: Place) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name()]):
            return True
        case ast.Name() | ast.Attribute():
            words = place.text(node).casefold()
            return "accumul" in words or "micro" in words or "steps" in words
        case _:
            return False


def _stored(target: ast.expr) -> list[ast.Name]:
    return [one for one in ast.walk(target) if isinstance(one, ast.Name)][-1:]


def _keys(place: Place, part: str | None, whole: str) -> list[str]:
    """What stands behind the name of a batch to get one of its tensors."""
    if part is None:
        return []
    if place.scope.description(whole).startswith("tensor"):
        return [""]
    found = [
        f"[{place.text(one.slice)}]"
        for one in ast.walk(place.source.tree)
        if isinstance(one, ast.Subscript)
        and isinstance(one.slice, ast.Constant)
        and isinstance(one.slice.value, str)
        and isinstance(one.value, ast.Name)
        and one.value.id in ("batch", "part", "shard", part, whole)
    ]
    return list(dict.fromkeys(found))[:1]


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
