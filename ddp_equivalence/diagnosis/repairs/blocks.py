"""Edits of blocks: statements that change places, and the headers of blocks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.parentheses import joined

_COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try)
_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

MOST_MOVED = 3


def swapped(node: ast.stmt, place: Place) -> Iterator[Change]:
    """Two steps were done in the wrong order, such as clipping before averaging."""
    block, index = place.source.block_of(node), place.source.index_in_block(node)
    if index + 1 < len(block):
        yield from _swap(node, block[index + 1], place)


def _swap(one: ast.stmt, other: ast.stmt, place: Place) -> Iterator[Change]:
    if _can_be_swapped(one, other):
        start, first_end = place.source.span(one)
        second_start, end = place.source.span(other)
        middle = place.source.between(first_end, second_start)
        yield Change(start, end, place.text(other) + middle + place.text(one))


def _can_be_swapped(one: ast.stmt, other: ast.stmt) -> bool:
    if isinstance(one, _JUMPS + _DEFINITIONS) or isinstance(other, _JUMPS + _DEFINITIONS):
        return False
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
        return False
    only_names = all(
        isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        for each in (one, other)
    )
    new = _names(one, ast.Store) & _names(other, ast.Load)
    return not only_names and not (new and isinstance(one, ast.Assign | ast.AnnAssign | ast.With))


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, context)
    }


def moved_out(node: ast.stmt, place: Place) -> Iterator[Change]:
    """Something is done in every turn of a loop, or only under a condition, and should be after."""
    around = place.parent(node)
    block = place.source.block_of(node)
    if not isinstance(around, _COMPOUND):
        return
    index = place.source.index_in_block(node)
    tail = block[index:]
    no_more_than_header = index == 0 and isinstance(around, ast.If | ast.With)
    if len(tail) <= MOST_MOVED and not (isinstance(tail[-1], _JUMPS) or no_more_than_header):
        yield from _behind(tail, around, place)


def _behind(tail: Sequence[ast.stmt], around: ast.stmt, place: Place) -> Iterator[Change]:
    start, tail_end = place.source.span(tail[0])[0], place.source.span(tail[-1])[1]
    end = place.source.span(around)[1]
    text = _at_indentation(tail, around, place)
    if text is not None:
        rest = place.source.between(tail_end, end)
        yield Change(start, end, f"pass{rest}{place.new_line(around)}{text}")


def _at_indentation(statements: Sequence[ast.stmt], like: ast.stmt, place: Place) -> str | None:
    """The text of statements with the indentation of another one; None where it would change."""
    old, new = place.source.indentation(statements[0]), place.source.indentation(like)
    if old is None or new is None or isinstance(statements[0], _DEFINITIONS):
        return None
    start, end = place.source.span(statements[0])[0], place.source.span(statements[-1])[1]
    first, *lines = place.source.between(start, end).split("\n")
    for one in statements:
        for part in ast.walk(one):
            if isinstance(part, ast.Constant | ast.JoinedStr) and part.lineno != part.end_lineno:
                return None  # the lines of a string would move with it
    return "\n".join([first, *(new + line.removeprefix(old) for line in lines)])


def condition_of_block(node: ast.stmt, place: Place) -> Iterator[Change]:
    """A condition holds on some ranks only, or is the opposite of what is meant."""
    if not isinstance(node, ast.If | ast.While):
        return
    text = place.text(node.test)
    yield place.replaced(node.test, "True")
    yield place.replaced(node.test, f"not {text}" if _is_closed(node.test) else f"not ({text})")
    if node.orelse:
        yield place.replaced(node.test, "False")


def _is_closed(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)


def context_left_out(node: ast.With, place: Place) -> Iterator[Change]:
    """A context such as ``no_sync()`` or ``no_grad()`` holds for more than it should."""
    start = place.source.span(node)[0]
    end = place.source.span(node.body[0])[0]
    header = place.source.between(start, end)
    after_colon = header[header.rindex(":") :]
    yield Change(start, end, f"if True{after_colon}")


def other_list_too(node: ast.For, place: Place) -> Iterator[Change]:
    """A loop goes over one of several lists, and another one was forgotten."""
    match node.iter:
        case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
            others = [f"self.{one}" for one in place.facts.attributes_beside(node.iter)]
            own = place.scope.description(f"self.{attribute}")
            for other in [one for one in others if place.scope.description(one) == own][:2]:
                yield place.replaced(node.iter, joined(f"self.{attribute}", "+", other))
        case _:
            return
