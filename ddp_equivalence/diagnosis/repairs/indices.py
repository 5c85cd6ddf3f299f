"""Edits of slices and indices."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.parentheses import joined


def another_slice(node: ast.Slice, place: Place) -> Iterator[Change]:
    """A part of the rows begins or ends one too early or too late, or should be all rows."""
    lower = place.text(node.lower) if node.lower else ""
    upper = place.text(node.upper) if node.upper else ""
    step = f":{place.text(node.step)}" if node.step else ""
    start, end = place.source.span(node)
    others = []
    if lower:
        others += [f":{upper}", *(f"{one}:{upper}" for one in _moved(lower))]
    if upper:
        others += [f"{lower}:", *(f"{lower}:{one}" for one in _moved(upper))]
    if not lower:
        others.append(f"1:{upper}")
    if not upper:
        others.append(f"{lower}:-1")
    if step:
        yield Change(start, end, f"{lower}:{upper}")
    for other in others:
        yield Change(start, end, other + step)


def _moved(bound: str) -> Iterator[str]:
    for sign in "+-":
        yield joined(bound, sign, "1")


def subscript_left_out(node: ast.Subscript, place: Place) -> Iterator[Change]:
    """A part was taken of something that is a part already, or the order was applied twice."""
    if not isinstance(node.ctx, ast.Load):
        return
    yield place.replaced(node, place.text(node.value))


def permutation_inverted(node: ast.Subscript, place: Place) -> Iterator[Change]:
    """Rows are put into an order again where they should be put back."""
    if isinstance(node.slice, ast.Name) and place.scope.may_be_tensor(node.slice.id):
        yield place.replaced(node.slice, f"{node.slice.id}.argsort()")


def index_off_by_one(node: ast.Subscript, place: Place) -> Iterator[Change]:
    """The counting begins at another number than that of what is read."""
    if isinstance(node.slice, ast.Name | ast.BinOp):
        text = place.text(node.slice)
        if isinstance(node.slice, ast.BinOp) or place.scope.may_be_number(text):
            for moved in _moved(text):
                yield place.replaced(node.slice, moved)


def shifted_too(node: ast.Compare, place: Place) -> Iterator[Change]:
    """A causal model predicts from the second position on, and only those are to be counted."""
    match node:
        case ast.Compare(left=ast.Subscript() | ast.Name() as left, ops=[ast.NotEq() | ast.Eq()]):
            if place.may_be_tensor(left):
                yield place.replaced(left, f"{place.text(left)}[:, 1:]")


def shifted_call(node: ast.Call, place: Place) -> Iterator[Change]:
    """A causal model predicts from the second position on, and only those are to be counted."""
    match node.func:
        case ast.Attribute(value=ast.Subscript() | ast.Name() as value, attr="ne" | "eq"):
            yield place.replaced(value, f"{place.text(value)}[:, 1:]")


def range_off_by_one(node: ast.Call, place: Place) -> Iterator[Change]:
    """A loop makes one turn too many or too few."""
    match node:
        case ast.Call(func=ast.Name(id="range"), args=[*_, _]):
            last = node.args[min(1, len(node.args) - 1)]
            for moved in _moved(place.text(last)):
                yield place.replaced(last, moved)
            if len(node.args) == 1:
                yield place.replaced(last, f"1, {place.text(last)}")
