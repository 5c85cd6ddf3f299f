"""Which nodes of a file may be edited: what computes something, and nothing that only says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.names_in_scope import Function

_NEVER = (
    ast.JoinedStr,
    ast.Assert,
    ast.Raise,
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
    ast.pattern,
    ast.arguments,
    ast.operator,
    ast.cmpop,
    ast.expr_context,
)

_MESSAGES = {"print", "warn", "log", "debug", "info", "warning", "error", "exception", "critical"}


def editable_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside functions that may be edited, in the order of the file."""
    yield from _below(tree, inside=False)


def _below(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    for child in _children(node):
        if isinstance(child, _NEVER) or _only_says_something(child):
            continue
        if inside and not isinstance(child, Function | ast.ClassDef):
            yield child
        yield from _below(child, inside or isinstance(child, Function))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that are run with it: no decorators, defaults or annotations."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield from node.body
        case ast.Lambda():
            yield node.body
        case ast.AnnAssign():
            yield from (part for part in (node.target, node.value) if part is not None)
        case _:
            yield from ast.iter_child_nodes(node)


def _only_says_something(node: ast.AST) -> bool:
    """True for a docstring, a message, and text that is put together."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in _MESSAGES
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod()):
            return True
        case ast.Call(func=ast.Attribute(attr="format")):
            return True
        case _:
            return False
