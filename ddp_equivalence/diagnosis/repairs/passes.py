"""Edits of backward passes: how many there are, into what they lead, and what was there before."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place

MOST_OWNERS = 2


def _goes_backward(statement: ast.stmt) -> ast.expr | None:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=value, attr="backward"), args=[])):
            return value
        case _:
            return None


def only_these_parameters(node: ast.Expr, place: Place) -> Iterator[Change]:
    """A loss leads back through another network too, which it is not meant to train."""
    value = _goes_backward(node)
    if value is None or not isinstance(node.value, ast.Call) or node.value.keywords:
        return
    for owner in _networks(place)[:MOST_OWNERS]:
        inputs = f"inputs=list({owner}.parameters())"
        yield place.rewritten(node, f"{place.closed(value)}.backward({inputs})")


def _networks(place: Place) -> list[str]:
    """What the function calls, and what the file asks for its parameters in other places."""
    listed, called = set(), []
    for one in ast.walk(place.source.tree):
        match one:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr="parameters")):
                listed.add(name)
            case _:
                pass
    for one in ast.walk(place.scope.function):
        match one:
            case ast.Call(func=ast.Attribute(attr=name) as function) if name in listed:
                called.append(place.text(function))
            case _:
                pass
    return list(dict.fromkeys(called))


def hooks_replaced(node: ast.Expr, place: Place) -> Iterator[Change]:
    """Hooks are registered in every step, and those of the steps before still act."""
    match node.value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="register_hook")):
            yield place.rewritten(node, f"{name}._backward_hooks = None; {place.text(node)}")
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name), attr="register_post_accumulate_grad_hook")
        ):
            before = f"{name}._post_accumulate_grad_hooks = None"
            yield place.rewritten(node, f"{before}; {place.text(node)}")
        case _:
            return


def before_skipped(node: ast.Continue, place: Place) -> Iterator[Change]:
    """What is skipped needs its place all the same: an offset must go on behind it."""
    loop = place.source.nearest(node, ast.For)
    if loop is None:
        return
    last = loop.body[-1]
    if not isinstance(last, ast.AugAssign):
        return
    names = {one.id for one in ast.walk(last.value) if isinstance(one, ast.Name)}
    needed = [
        place.text(one)
        for one in loop.body
        if isinstance(one, ast.Assign)
        and one.lineno > node.lineno
        and isinstance(one.targets[0], ast.Name)
        and one.targets[0].id in names
    ]
    yield place.rewritten(node, "; ".join([*needed, place.text(last), "continue"]))
