"""Edits of backward passes: how many there are, into what they lead, and what was there before."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.parentheses import joined

MOST_OWNERS = 2


def one_pass(node: ast.stmt, place: Place) -> Iterator[Change]:
    """DDP reduces gradients in one backward pass after each forward pass, and not in a second."""
    block = place.source.block_of(node)
    index = place.source.index_in_block(node)
    first = _goes_backward(node)
    for other in block[index + 1 :]:
        second = _goes_backward(other)
        if first is None or second is None:
            continue
        both = f"({joined(place.text(first), '+', place.text(second))}).backward()"
        start, own_end = place.source.span(node)
        other_start, end = place.source.span(other)
        between = place.source.between(own_end, other_start)
        yield Change(start, end, f"pass{between}{both}" if between.strip() else both)
        break
    match node:
        case ast.For(target=ast.Name(id=name), iter=ast.Name(id=terms), body=body):
            for number, one in enumerate(body):
                value = _goes_backward(one)
                if isinstance(value, ast.Name) and value.id == name:
                    yield place.rewritten(node, _in_front(node, number, terms, place))
        case _:
            return


def _goes_backward(statement: ast.stmt) -> ast.expr | None:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=value, attr="backward"), args=[])):
            return value
        case _:
            return None


def _in_front(loop: ast.For, number: int, terms: str, place: Place) -> str:
    """The backward pass of the sum, and the loop with what else it does."""
    whole = f"sum({terms}).backward()"
    if len(loop.body) == 1:
        return whole
    start, end = place.source.span(loop)
    one_start, one_end = place.source.span(loop.body[number])
    before, after = place.source.between(start, one_start), place.source.between(one_end, end)
    return f"{whole}{place.new_line(loop)}{before}pass{after}"


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


def gradients_reset(node: ast.stmt, place: Place) -> Iterator[Change]:
    """Gradients of the step before, or of another loss, are still there."""
    function = place.scope.function
    is_first = not isinstance(function, ast.Lambda) and function.body[0] is node
    if not (is_first or _goes_backward(node) is not None) or not isinstance(
        node, ast.Expr | ast.Assign
    ):
        return
    owners = list(_owners_of_gradients(function, place))
    if is_first:
        owners = [one for one in owners if one.split(".")[0] in place.scope.parameters]
    elif "model" in place.scope.parameters:
        owners.append("model")
    for text in owners[:1]:
        if f"{text}.zero_grad" not in place.text(node):
            yield place.rewritten(node, f"{text}.zero_grad(); {place.text(node)}")


def _owners_of_gradients(function: ast.AST, place: Place) -> Iterator[str]:
    """The modules and optimizers that a function uses as such."""
    for one in ast.walk(function):
        match one:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name() | ast.Attribute() as owner, attr="parameters" | "zero_grad"
                )
            ):
                yield place.text(owner)
            case _:
                pass


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
