"""Edits of operators, comparisons and conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.parentheses import closed, joined

OTHER_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("/",),
    ast.Div: ("*",),
    ast.FloorDiv: ("/", "%"),
    ast.Mod: ("//",),
    ast.Pow: ("*",),
}

ORDERED: dict[type[ast.operator], str] = {
    ast.Sub: "-",
    ast.Div: "/",
    ast.Mod: "%",
    ast.FloorDiv: "//",
    ast.MatMult: "@",
}

OTHER_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=", ">", "<"),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
}


def another_operator(node: ast.BinOp, place: Place) -> Iterator[Change]:
    """Somebody divides instead of multiplying, or takes the row for the column (// for %)."""
    left, right = place.text(node.left), place.text(node.right)
    for sign in OTHER_OPERATORS.get(type(node.op), ()):
        yield place.replaced(node, joined(left, sign, right))


def operand_left_out(node: ast.BinOp, place: Place) -> Iterator[Change]:
    """A factor or an offset was applied that another part of the code applies as well."""
    yield place.replaced(node, place.text(node.left))
    yield place.replaced(node, place.text(node.right))


def operands_swapped(node: ast.BinOp, place: Place) -> Iterator[Change]:
    """A ratio or a difference was written the wrong way round."""
    if sign := ORDERED.get(type(node.op)):
        left, right = place.text(node.left), place.text(node.right)
        yield place.replaced(node, joined(right, sign, left))


def rounded_up(node: ast.BinOp, place: Place) -> Iterator[Change]:
    """A size was rounded down, so that the last part of the data belongs to nobody."""
    if isinstance(node.op, ast.FloorDiv):
        left, right = place.text(node.left), place.text(node.right)
        yield place.replaced(node, f"-({joined(f'-{closed(left)}', '//', right)})")


def another_comparison(node: ast.Compare, place: Place) -> Iterator[Change]:
    """A limit was counted in or out by mistake, or a condition is the opposite of what is meant."""
    if len(node.ops) == 1:
        left, right = place.text(node.left), place.text(node.comparators[0])
        for sign in OTHER_COMPARISONS.get(type(node.ops[0]), ()):
            if (sign, right) != ("<", "0"):  # no rank and no count is negative
                yield place.replaced(node, joined(left, sign, right))


def condition_left_out(node: ast.BoolOp, place: Place) -> Iterator[Change]:
    """A condition holds on some ranks only, or was copied from another place."""
    sign = "and" if isinstance(node.op, ast.And) else "or"
    for value in node.values:
        rest = [place.text(other) for other in node.values if other is not value]
        yield place.replaced(node, _joined(rest, sign))


def and_or(node: ast.BoolOp, place: Place) -> Iterator[Change]:
    """Conditions were joined with "and" where one of them is enough, or the reverse."""
    sign = "or" if isinstance(node.op, ast.And) else "and"
    yield place.replaced(node, _joined([place.text(value) for value in node.values], sign))


def sign_left_out(node: ast.UnaryOp, place: Place) -> Iterator[Change]:
    """A sign or a "not" is one too many."""
    yield place.replaced(node, place.text(node.operand))


def parentheses_moved(node: ast.BinOp, place: Place) -> Iterator[Change]:
    """A factor or a divisor reaches one term too many, or one too few."""
    if isinstance(node.op, ast.Mult | ast.Div):
        sign = "*" if isinstance(node.op, ast.Mult) else "/"
        left, right = place.text(node.left), place.text(node.right)
        match node.left, node.right:
            case ast.BinOp(left=first, op=ast.Add() | ast.Sub() as inner, right=second), _:
                last = joined(place.text(second), sign, right)
                yield place.replaced(node, joined(place.text(first), _weak(inner), last))
            case _, ast.BinOp(left=first, op=ast.Add() | ast.Sub() as inner, right=second):
                product = joined(left, sign, place.text(first))
                yield place.replaced(node, joined(product, _weak(inner), place.text(second)))
    if isinstance(node.op, ast.Add | ast.Sub):
        left, right, sign = place.text(node.left), place.text(node.right), _weak(node.op)
        match node.left, node.right:
            case _, ast.BinOp(left=first, op=ast.Mult() | ast.Div() as strong, right=second):
                both = joined(left, sign, place.text(first))
                by = "*" if isinstance(strong, ast.Mult) else "/"
                yield place.replaced(node, joined(both, by, place.text(second)))
            case ast.BinOp(left=first, op=ast.Mult(), right=second), _:
                both = joined(place.text(second), sign, right)
                yield place.replaced(node, joined(place.text(first), "*", both))


def _weak(operator: ast.operator) -> str:
    return "+" if isinstance(operator, ast.Add) else "-"


def _joined(texts: list[str], sign: str) -> str:
    whole = texts[0]
    for text in texts[1:]:
        whole = joined(whole, sign, text)
    return whole
