"""Edits of simple statements: other assignments, results that are used, jumps, reductions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.names_in_scope import own_nodes
from ddp_equivalence.diagnosis.repairs.wraps import computes_tensor

OTHER_ASSIGNMENTS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("=", "-="),
    ast.Sub: ("=", "+="),
    ast.Mult: ("=", "/="),
    ast.Div: ("=", "*="),
}


def added_up(node: ast.Assign, place: Place) -> Iterator[Change]:
    """A part replaces the parts before it, instead of being added to them."""
    if len(node.targets) == 1 and not isinstance(node.targets[0], ast.Tuple):
        target = place.text(node.targets[0])
        in_init = getattr(place.scope.function, "name", "") == "__init__"
        if in_init or target in place.text(node.value):
            return
        if not isinstance(node.targets[0], ast.Name) or place.is_bound_elsewhere(target, node):
            yield place.rewritten(node, f"{target} += {place.text(node.value)}")


def equal_indices_added(node: ast.AugAssign, place: Place) -> Iterator[Change]:
    """An index that occurs twice is added only once by ``+=``."""
    match node:
        case ast.AugAssign(
            target=ast.Subscript(value=table, slice=ast.Name(id=index)), op=ast.Add(), value=value
        ) if place.scope.may_be_tensor(index):
            added = f"{place.text(table)}.index_add_(0, {index}, {place.text(value)})"
            yield place.rewritten(node, added)


def returned(node: ast.stmt, place: Place) -> Iterator[Change]:
    """A function computes something as its last step and forgets to return it."""
    function = place.scope.function
    if isinstance(function, ast.Lambda) or function.body[-1] is not node:
        return
    match node:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.Expr(value=ast.Call() as value):
            yield place.rewritten(node, f"return {place.text(value)}")
        case _:
            return


def jump(node: ast.stmt, place: Place) -> Iterator[Change]:
    """A function ends where only one turn of a loop should, or a loop where one turn should."""
    around = place.source.nearest(node, ast.For, ast.While, ast.FunctionDef)
    in_loop = isinstance(around, ast.For | ast.While)
    match node:
        case ast.Return() if in_loop:
            yield place.rewritten(node, "continue")
        case ast.Return(value=None):
            yield place.rewritten(node, "pass")
        case ast.Continue():
            yield place.rewritten(node, "pass")
            yield place.rewritten(node, "break")
        case ast.Break():
            yield place.rewritten(node, "continue")
            yield place.rewritten(node, "pass")
        case _:
            return


def reduced(node: ast.stmt, place: Place) -> Iterator[Change]:
    """A number of this rank is used as if it were that of all ranks."""
    target = _assigned_tensor(node, place)
    all_reduce, world_size = place.facts.all_reduce, place.world_size()
    if target and all_reduce:
        yield place.followed_by(node, f"{all_reduce}({target})")
        for group in _groups(place):
            yield place.followed_by(node, f"{all_reduce}({target}, group={group})")
        if world_size:
            yield place.followed_by(node, f"{all_reduce}({target}); {target} /= {world_size}")


def _groups(place: Place) -> list[str]:
    """How the function writes the process group, if it has one."""
    found = [
        place.text(one)
        for one in own_nodes(place.scope.function)
        if isinstance(one, ast.Attribute | ast.Name)
        and getattr(one, "attr", getattr(one, "id", "")) in ("group", "process_group")
        and isinstance(one.ctx, ast.Load)
    ]
    return list(dict.fromkeys(found))[:1]


def _assigned_tensor(node: ast.stmt, place: Place) -> str | None:
    match node:
        case ast.Assign(targets=[target], value=value):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            pass
        case ast.AugAssign(target=target, value=value):
            pass
        case _:
            return None
    text = place.text(target)
    may_be = isinstance(target, ast.Name | ast.Attribute) and place.scope.may_be_tensor(text)
    return text if may_be and computes_tensor(value, place) else None


def reduced_with_gradient(node: ast.Expr, place: Place) -> Iterator[Change]:
    """A collective of torch.distributed passes no gradient on to what the other ranks gave."""
    match node.value:
        case ast.Call(args=[ast.Name(id=name), *_] as arguments, keywords=keywords):
            called = place.called_name(node.value)
            options = [place.text(one) for one in keywords]
            module = "torch.distributed.nn.functional"
            given = f"import {module} as differentiable; {name} = differentiable.{called}"
            if any(one.arg == "async_op" for one in keywords):
                return
            if called == "all_reduce" and len(arguments) == 1:
                yield place.rewritten(node, f"{given}({', '.join([name, *options])})")
            if called == "all_gather" and len(arguments) == 2:
                given_to = [place.text(arguments[1]), *options]
                yield place.rewritten(node, f"{given}({', '.join(given_to)})")
        case _:
            return


def left_out(node: ast.stmt, place: Place) -> Iterator[Change]:
    """Something is done that another part of the code does already, or that is not wanted here."""
    if isinstance(node, ast.Pass | ast.Return | ast.Continue | ast.Break | ast.FunctionDef):
        return
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            if not place.is_bound_elsewhere(name, node):
                return  # what reads it could not run
        case ast.Assign(targets=[ast.Tuple()]):
            return
    yield place.rewritten(node, "pass")


def assigned(node: ast.AugAssign, place: Place) -> Iterator[Change]:
    """What was there before should be replaced, or the opposite is done of what is meant."""
    for sign in OTHER_ASSIGNMENTS.get(type(node.op), ()):
        target, value = place.text(node.target), place.text(node.value)
        yield place.rewritten(node, f"{target} {sign} {value}")


def result_used(node: ast.Expr, place: Place) -> Iterator[Change]:
    """A function returns what it has computed, and changes nothing of what it is given."""
    if not isinstance(node.value, ast.Call):
        return
    call = place.text(node.value)
    for argument in node.value.args[:1]:
        if isinstance(argument, ast.Name | ast.Attribute | ast.Subscript):
            yield place.rewritten(node, f"{place.text(argument)} = {call}")
    match node.value.func:
        case ast.Attribute(value=ast.Name(id=name)) if name in place.scope.names:
            if name not in ("self", "ctx"):
                yield place.rewritten(node, f"{name} = {call}")
        case ast.Attribute(value=ast.Attribute() as owner):
            if place.text(owner).split(".")[0] not in place.facts.modules:
                yield place.rewritten(node, f"{place.text(owner)} = {call}")
