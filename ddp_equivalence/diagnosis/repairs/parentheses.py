"""Whether an expression needs parentheses in the place where an edit puts it."""

from __future__ import annotations

import ast
from functools import lru_cache

_BARE_TUPLE, _CONDITIONAL, _OR, _AND, _NOT, _COMPARISON = -1, 0, 1, 2, 3, 4
_SUM, _PRODUCT, _SIGN, _POWER, _CLOSED = 9, 10, 11, 12, 14

_STRENGTHS: dict[type[ast.AST], int] = {
    ast.Or: _OR,
    ast.And: _AND,
    ast.BitOr: 5,
    ast.BitXor: 6,
    ast.BitAnd: 7,
    ast.LShift: 8,
    ast.RShift: 8,
    ast.Add: _SUM,
    ast.Sub: _SUM,
    ast.Mult: _PRODUCT,
    ast.Div: _PRODUCT,
    ast.FloorDiv: _PRODUCT,
    ast.Mod: _PRODUCT,
    ast.MatMult: _PRODUCT,
    ast.Pow: _POWER,
}


def strength(node: ast.expr, text: str) -> int:
    """How strongly an expression holds together; the order is that of Python's grammar."""
    match node:
        case ast.NamedExpr() | ast.Yield() | ast.YieldFrom() | ast.Starred():
            return -2
        case ast.Tuple():
            return _CLOSED if text.startswith("(") else _BARE_TUPLE
        case ast.IfExp() | ast.Lambda():
            return _CONDITIONAL
        case ast.BoolOp(op=operator):
            return _STRENGTHS[type(operator)]
        case ast.BinOp(op=operator):
            return _STRENGTHS[type(operator)]
        case ast.UnaryOp(op=sign):
            return _NOT if isinstance(sign, ast.Not) else _SIGN
        case ast.Compare():
            return _COMPARISON
        case ast.Await():
            return _POWER + 1
        case _:
            return _CLOSED


def needed_strength(parent: ast.AST, node: ast.expr) -> int:
    """How strongly an expression must hold together that takes the place of a node."""
    match parent:
        case ast.Assign() | ast.AugAssign() | ast.Return() | ast.Expr():
            return _BARE_TUPLE
        case ast.Subscript(slice=index) if index is node:
            return _BARE_TUPLE
        case ast.Attribute() | ast.Subscript() | ast.Await():
            return _CLOSED
        case ast.Call(func=called):
            return _CLOSED if called is node else _CONDITIONAL
        case ast.BinOp(left=left, op=operator):
            own = _STRENGTHS[type(operator)]
            first_binds = isinstance(operator, ast.Pow)
            return own + ((node is left) if first_binds else (node is not left))
        case ast.BoolOp(op=operator):
            return _STRENGTHS[type(operator)] + 1
        case ast.Compare() | ast.Starred():
            return _COMPARISON + 1
        case ast.UnaryOp(op=sign):
            return _NOT if isinstance(sign, ast.Not) else _SIGN
        case ast.IfExp(orelse=other):
            return _CONDITIONAL if node is other else _OR
        case ast.comprehension():
            return _OR
        case _:
            return _CONDITIONAL


def are_needed(text: str, parent: ast.AST, node: ast.expr) -> bool:
    """True if a text that takes the place of a node needs parentheses there."""
    new = _parsed(text)
    if new is None:
        return False  # it is no expression, but part of a slice
    if new == _CLOSED:
        return False
    return "\n" in text or new < needed_strength(parent, node)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> int | None:
    try:
        return strength(ast.parse(f"({text}\n)", mode="eval").body, text)
    except SyntaxError:
        return None


def joined(left: str, sign: str, right: str) -> str:
    """Two expressions with an operator between them, in parentheses where they need them."""
    whole = ast.parse(f"a {sign} b", mode="eval").body
    match whole:
        case ast.BinOp(left=first, right=second):
            pass
        case ast.Compare(left=first, comparators=[second]):
            pass
        case ast.BoolOp(values=[first, second]):
            pass
        case _:
            raise AssertionError(sign)
    ends = [
        f"({text})" if are_needed(text, whole, node) else text
        for text, node in ((left, first), (right, second))
    ]
    return f"{ends[0]} {sign} {ends[1]}"


def closed(text: str) -> str:
    """An expression that can get an attribute or an index, in parentheses if it needs them."""
    new = _parsed(text)
    return text if new == _CLOSED and not text[:1].isdigit() else f"({text})"
