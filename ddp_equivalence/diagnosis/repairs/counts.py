"""Edits of numbers of examples: those of this rank, of all ranks, and of what a mask keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.over_ranks import is_mean, is_reducer, total_of
from ddp_equivalence.diagnosis.repairs.parentheses import joined


def count_of_all(node: ast.BinOp, place: Place) -> Iterator[Change]:
    """A sum is divided by the number of this rank's examples, and ranks have different numbers."""
    if not isinstance(node.op, ast.Div):
        return
    for number in _numbers_below(node.right, place):
        total = total_of(place.text(number), node, place, _counted(number, place))
        if total is None:
            continue
        if number is node.right:
            # Who averages over ranks afterwards, as DDP does, divides by their number again.
            world_size = place.world_size()
            if world_size:
                above = joined(place.text(node.left), "*", world_size)
                yield place.replaced(node, joined(above, "/", total))
            if not _is_averaged(node, place):
                yield place.replaced(node.right, total)
        else:
            yield place.replaced(node.right, total)


def _numbers_below(divisor: ast.expr, place: Place) -> Iterator[ast.expr]:
    """The number in a divisor: it stands alone, or is multiplied by the world size."""
    match divisor:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            for number, other in ((left, right), (right, left)):
                if is_count(number) and "world_size" in place.text(other):
                    yield number
        case _ if is_count(divisor):
            yield divisor


def _counted(number: ast.expr, place: Place) -> str:
    match number:
        case ast.Call(func=ast.Attribute(value=counted)) | ast.Call(args=[counted]):
            return place.text(counted)
        case ast.Subscript(value=ast.Attribute(value=counted)):
            return place.text(counted)
        case _:
            return ""


def is_count(node: ast.expr) -> bool:
    """True for ``len(x)``, ``x.numel()``, ``x.size(0)`` and ``x.shape[0]``."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[_]):
            return True
        case ast.Call(func=ast.Attribute(attr="numel"), args=[]):
            return True
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=0)]):
            return True
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=0)):
            return True
        case _:
            return False


def _is_averaged(node: ast.expr, place: Place) -> bool:
    parent = place.parent(node)
    return isinstance(parent, ast.Call) and is_mean(parent, place)


def mean_over_all(node: ast.Call, place: Place) -> Iterator[Change]:
    """The mean of the ranks' means weighs every rank alike, however many examples it has."""
    match node:
        case ast.Call(func=ast.Attribute(value=values, attr="mean")):
            pass
        case _:
            return
    count = _count_of_mean(node, values, place)
    if count is None or place.text(values).split(".")[0] in place.facts.modules:
        return
    end = place.source.span(values)[1]
    arguments = place.source.between(end, place.source.span(node)[1]).replace(".mean", "", 1)
    summed = f"{place.closed(values)}.sum{arguments.lstrip(' )')}"
    parent = place.parent(node)
    if isinstance(parent, ast.Call) and is_reducer(parent, place):
        match place.parent(parent):
            case ast.BinOp(op=ast.Div()) as mean if mean.left is parent:
                reducer = place.text(parent.func)
                tensor = place.facts.imported_as("torch.tensor")
                if tensor:
                    whole = f"{reducer}({tensor}({count}))"
                    yield place.replaced(mean, joined(f"{reducer}({summed})", "/", whole))
                    return
    elif not _is_reduced_later(node, place):
        return
    total, world_size = total_of(count, node, place), place.world_size()
    if total and world_size:
        yield place.replaced(node, joined(joined(summed, "*", world_size), "/", total))


def _count_of_mean(node: ast.Call, values: ast.expr, place: Place) -> str | None:
    dimensions = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "dim")]
    text = place.closed(values)
    match dimensions:
        case []:
            return f"{text}.numel()"
        case [ast.Constant(value=0)]:
            return f"len({place.text(values)})"
        case _:
            return None


def _is_reduced_later(node: ast.Call, place: Place) -> bool:
    """True where the mean gets a name, and the function calls a collective."""
    statement = place.source.nearest(node, ast.stmt)
    calls = [one for one in ast.walk(place.scope.function) if isinstance(one, ast.Call)]
    reduced = any(place.called_name(one) == "all_reduce" for one in calls)
    return reduced and isinstance(statement, ast.Assign)
