"""Edits that do something after a reduction over ranks which was done before it, or the reverse.

A sum over ranks of values with an addend holds that addend once for each rank.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.names_in_scope import own_nodes
from ddp_equivalence.diagnosis.repairs.over_ranks import is_reducer, reduces
from ddp_equivalence.diagnosis.repairs.parentheses import joined

NOT_LINEAR = {
    *("clamp", "clamp_min", "clamp_max", "sqrt", "rsqrt", "log", "exp", "square", "abs"),
    *("reciprocal", "round", "floor", "ceil", "sigmoid", "tanh", "relu", "normalize"),
}

SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
}


def addend_outside(node: ast.Call, place: Place) -> Iterator[Change]:
    """A number is added to the values of each rank, and should be added to their sum once."""
    if not is_reducer(node, place):
        return
    match node.args:
        case [ast.BinOp(left=left, op=operator, right=right)] if type(operator) in SIGNS:
            sign = SIGNS[type(operator)]
            if _is_number(right):
                reduced = f"{place.text(node.func)}({place.text(left)})"
                yield place.replaced(node, joined(reduced, sign, place.text(right)))
            elif _is_number(left):
                reduced = f"{place.text(node.func)}({place.text(right)})"
                yield place.replaced(node, joined(place.text(left), sign, reduced))
        case _:
            return


def _is_number(node: ast.expr) -> bool:
    """True for a number that is written down, or has the name of a constant."""
    match node:
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return name.isupper()
        case ast.Attribute(value=ast.Name(id="self")):
            return True
        case _:
            return False


def addend_after(node: ast.Assign, place: Place) -> Iterator[Change]:
    """A number is added on each rank, deep inside of what is reduced, and should be added once."""
    if not (isinstance(node.value, ast.Call) and is_reducer(node.value, place)):
        return
    for argument, name in _arguments_with_names(node):
        for inner in ast.walk(argument):
            match inner:
                case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
                    if _is_number(right) and inner is not argument:
                        changed = _without(inner, left, node, place)
                        moved = joined(name, SIGNS[type(operator)], place.text(right))
                        yield place.rewritten(node, f"{changed}; {name} = {moved}")
                case _:
                    pass


def _arguments_with_names(node: ast.Assign) -> Iterator[tuple[ast.expr, str]]:
    assert isinstance(node.value, ast.Call)
    arguments = node.value.args
    match node.targets:
        case [ast.Name(id=name)] if len(arguments) == 1:
            yield arguments[0], name
        case [ast.Tuple(elts=names)] if len(names) == len(arguments):
            for argument, target in zip(arguments, names, strict=True):
                if isinstance(target, ast.Name):
                    yield argument, target.id
        case _:
            return


def _without(inner: ast.expr, kept: ast.expr, statement: ast.stmt, place: Place) -> str:
    """A statement with a part of it in place of an expression."""
    change = place.replaced(inner, place.text(kept))
    start, end = place.source.span(statement)
    before = place.source.between(start, change.start)
    return f"{before}{change.text}{place.source.between(change.end, end)}"


def limited_after(node: ast.Assign, place: Place) -> Iterator[Change]:
    """The values of each rank are limited before their sum over ranks, and not the sum."""
    match node.targets:
        case [ast.Name(id=name)]:
            pass
        case _:
            return
    reduction = _reduction_of(name, node, place)
    if reduction is None:
        return
    start, own_end = place.source.span(node)
    end = place.source.span(reduction)[1]
    between = place.source.between(own_end, end) + place.new_line(node)
    for changed, moved in _done_before(node, name, place):
        yield Change(start, end, f"{changed}{between}{name} = {moved}")


def _done_before(node: ast.Assign, name: str, place: Place) -> Iterator[tuple[str, str]]:
    """The assignment without an operation, and the operation of its own."""
    for inner in ast.walk(node.value):
        match inner:
            case ast.Call(func=ast.Attribute(value=receiver, attr=method)):
                if method in NOT_LINEAR and not _is_module(receiver, place):
                    end = place.source.span(receiver)[1]
                    call = place.source.between(end, place.source.span(inner)[1]).lstrip(" )\n")
                    yield _without(inner, receiver, node, place), f"{name}{call}"
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
                if _is_number(right):
                    moved = joined(name, SIGNS[type(operator)], place.text(right))
                    yield _without(inner, left, node, place), moved
            case _:
                pass


def _is_module(node: ast.expr, place: Place) -> bool:
    return place.text(node).split(".")[0] in place.facts.modules


def _reduction_of(name: str, node: ast.stmt, place: Place) -> ast.stmt | None:
    """The later statement of the same block that reduces a variable over ranks."""
    block = place.source.block_of(node)
    index = place.source.index_in_block(node)
    for statement in block[index + 1 :]:
        if isinstance(statement, ast.Expr | ast.If) and reduces(statement, name, place):
            return statement
    return None


def around_mean_of_all(node: ast.Call, place: Place) -> Iterator[Change]:
    """The variance of each rank's values is that around the rank's own mean."""
    match node:
        case ast.Call(func=ast.Attribute(value=values, attr="var"), args=arguments):
            pass
        case _:
            return
    means = [
        one.targets[0].id
        for one in own_nodes(place.scope.function)
        if isinstance(one, ast.Assign)
        and isinstance(one.targets[0], ast.Name)
        and "mean" in one.targets[0].id
        and one.lineno < node.lineno
    ]
    given = [place.text(one) for one in arguments]
    given += [place.text(one) for one in node.keywords if one.arg in ("dim", "keepdim")]
    around = place.parent(node)
    for mean in dict.fromkeys(means):
        squares = f"{place.closed(values)}.square().mean({', '.join(given)})"
        if isinstance(around, ast.Call) and is_reducer(around, place):
            reduced = f"{place.text(around.func)}({squares})"
            yield place.replaced(around, joined(reduced, "-", f"{mean}.square()"))
        else:
            yield place.replaced(node, joined(squares, "-", f"{mean}.square()"))
