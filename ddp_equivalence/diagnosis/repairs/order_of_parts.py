"""Edits of how rows are dealt to ranks, and of how the parts of ranks are put together."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place

# As many matrices are stacked: those of queries, keys and values, or of a gate and what it opens.
STACKED = (3, 2)


def parts_joined(node: ast.Call, place: Place) -> Iterator[Change]:
    """Rows that were dealt in turn are put together one rank after the other, or the reverse."""
    match node:
        case ast.Call(func=ast.Attribute(attr="cat" | "concat"), args=[parts, *rest]):
            axis = _axis(rest, node.keywords)
            stack = place.facts.imported_as("torch.stack")
            if stack is not None and axis is not None and not _is_display(parts):
                stacked = f"{stack}({place.text(parts)}, {axis + 1})"
                yield place.replaced(node, f"{stacked}.flatten({axis}, {axis + 1})")
        case ast.Call(
            func=ast.Attribute(
                attr="flatten",
                value=ast.Call(func=ast.Attribute(attr="stack"), args=[parts, *rest]) as stacked,
            )
        ):
            axis = _axis(rest, stacked.keywords)
            cat = place.facts.imported_as("torch.cat")
            if cat is not None and axis is not None and axis > 0:
                last = f", {axis - 1}" if axis > 1 else ""
                yield place.replaced(node, f"{cat}({place.text(parts)}{last})")
        case _:
            return


def _is_display(node: ast.expr) -> bool:
    """True for a list that is written out: its members are no parts of ranks."""
    return isinstance(node, ast.List | ast.Tuple)


def _axis(arguments: list[ast.expr], keywords: list[ast.keyword]) -> int | None:
    given = [*arguments, *(one.value for one in keywords if one.arg == "dim")]
    match given:
        case []:
            return 0
        case [ast.Constant(value=int(axis))]:
            return axis
        case _:
            return None


def part_of_each(node: ast.Subscript, place: Place) -> Iterator[Change]:
    """A weight holds several matrices, and a rank needs its part of each of them."""
    match node:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=whole, attr="chunk"), args=[n]), slice=r
        ) if isinstance(r, ast.Name | ast.Attribute | ast.Call):
            for matrices in STACKED:
                sizes = f"(0, ({matrices}, {place.text(n)}, -1))"
                split = f"{place.closed(whole)}.unflatten{sizes}"
                yield place.replaced(node, f"{split}[:, {place.text(r)}].flatten(0, 1)")
        case _:
            return
