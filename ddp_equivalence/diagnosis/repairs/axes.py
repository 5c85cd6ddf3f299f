"""Edits of the order of axes, and of the end at which a slice lies."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.parentheses import closed

MOST_AXES = 3


def sizes_swapped(node: ast.Call, place: Place) -> Iterator[Change]:
    """Rows are laid out by one thing and then by another, and are read the other way round."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=value, attr="view" | "reshape" as method),
            args=[_, _, *_] as sizes,
            keywords=[],
        ) if not any(isinstance(one, ast.Starred) for one in sizes):
            texts = [place.text(one) for one in sizes]
            for axis in range(min(len(texts), MOST_AXES) - 1):
                other = [*texts]
                other[axis : axis + 2] = texts[axis + 1], texts[axis]
                if texts[axis] != texts[axis + 1]:
                    viewed = f"{place.text(value)}.{method}({', '.join(other)})"
                    yield place.replaced(node, f"{viewed}.transpose({axis}, {axis + 1})")
        case _:
            return


def mirrored(node: ast.Slice, place: Place) -> Iterator[Change]:
    """What belongs to the end of a stretch is put at its beginning, or the reverse."""
    if node.step is not None:
        return
    start, end = place.source.span(node)
    match node.lower, node.upper:
        case None, ast.UnaryOp(op=ast.USub(), operand=n):
            yield Change(start, end, f"{place.text(n)}:")
        case None, ast.expr() as n:
            yield Change(start, end, f"{_negative(n, place)}:")
        case ast.UnaryOp(op=ast.USub(), operand=n), None:
            yield Change(start, end, f":{place.text(n)}")
        case ast.expr() as n, None:
            yield Change(start, end, f":{_negative(n, place)}")
        case _:
            return


def _negative(node: ast.expr, place: Place) -> str:
    text = place.text(node)
    return f"-{text if text.isdigit() else closed(text)}"


def both_bounds(node: ast.Compare, place: Place) -> Iterator[Change]:
    """What belongs to this rank lies between two bounds, and only one of them is asked for."""
    match node:
        case ast.Compare(left=left, ops=[ast.Lt()], comparators=[ast.Name(id=stop)]):
            for start in [one for one, other in _bounds(place) if other == stop]:
                text = place.text(left)
                yield place.replaced(node, f"({start} <= {text}) & ({place.text(node)})")
        case ast.Compare(left=left, ops=[ast.GtE()], comparators=[ast.Name(id=start)]):
            for stop in [other for one, other in _bounds(place) if one == start]:
                text = place.text(left)
                yield place.replaced(node, f"({place.text(node)}) & ({text} < {stop})")
        case _:
            return


def _bounds(place: Place) -> list[tuple[str, str]]:
    """The names that stand on both sides of the colon of a slice."""
    found = []
    for node in ast.walk(place.scope.function):
        match node:
            case ast.Slice(lower=ast.Name(id=start), upper=ast.Name(id=stop)):
                found.append((start, stop))
            case _:
                pass
    return list(dict.fromkeys(found))
