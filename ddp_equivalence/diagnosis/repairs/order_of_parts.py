"""Edits of how rows are dealt to ranks, and of how the parts of ranks are put together."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.parentheses import closed, joined

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


def dealt_in_turn(node: ast.Subscript, place: Place) -> Iterator[Change]:
    """Ranks take stretches of the rows where others deal them in turn, or the reverse."""
    match node:
        case ast.Subscript(
            value=ast.Call(
                func=ast.Attribute(value=whole, attr="chunk" | "tensor_split"), args=[n, *rest]
            ) as call,
            slice=r,
        ) if not isinstance(r, ast.Slice):
            axis = _axis(rest, call.keywords)
            before = {0: "", 1: ":, ", -1: "..., "}.get(axis) if axis is not None else None
            if before is not None:
                rows = f"{before}{place.text(r)}::{place.text(n)}"
                yield place.replaced(node, f"{place.closed(whole)}[{rows}]")
        case ast.Subscript(
            value=whole, slice=ast.Slice(lower=ast.expr() as r, upper=None, step=ast.expr() as n)
        ):
            whole_text, first, parts = place.text(whole), place.text(r), place.text(n)
            if place.may_be_tensor(whole):
                yield place.replaced(node, f"{closed(whole_text)}.chunk({parts})[{first}]")
        case ast.Subscript(slice=ast.Slice(lower=ast.expr() as r, upper=ast.expr() as n) as rows):
            world_size = place.world_size()
            rank = _rank_in(r, n, place)
            if rank and world_size and rows.step is None:
                yield place.replaced(rows, f"{rank}::{world_size}")
        case _:
            return


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


def _rank_in(lower: ast.expr, upper: ast.expr, place: Place) -> str | None:
    """The number of the rank, if the rows between two bounds are those of one rank."""
    match lower, upper:
        case (
            ast.BinOp(left=rank, op=ast.Mult()),
            ast.BinOp(left=ast.BinOp(left=other, op=ast.Add()), op=ast.Mult()),
        ) if place.text(rank) == place.text(other):
            return place.text(rank)
        case ast.Name(id=first), ast.BinOp(left=ast.Name(id=again), op=ast.Add()):
            return place.rank() if first == again else None
        case _:
            return None


def numbers_dealt_in_turn(node: ast.Call, place: Place) -> Iterator[Change]:
    """The numbers of a rank's rows are those of a stretch, and rows are dealt in turn."""
    if place.called_name(node) not in ("range", "arange", "islice"):
        return
    called = place.text(node.func)
    match node.args:
        case [lower, ast.BinOp(op=ast.Mult(), right=size) as upper]:
            rank, n = _rank_in(lower, upper, place), place.world_size()
            if rank and n:
                last = joined(n, "*", place.text(size))
                yield place.replaced(node, f"{called}({rank}, {last}, {n})")
        case [r, ast.BinOp(left=n, op=ast.Mult(), right=size), m] if place.text(n) == place.text(m):
            start = joined(place.text(r), "*", place.text(size))
            stop = joined(joined(place.text(r), "+", "1"), "*", place.text(size))
            yield place.replaced(node, f"{called}({start}, {stop})")
        case [ast.Name() as whole, r, ast.Constant(value=None), n]:
            rows = joined(f"len({place.text(whole)})", "//", place.text(n))
            first = joined(place.text(r), "*", rows)
            stop = joined(joined(place.text(r), "+", "1"), "*", rows)
            yield place.replaced(node, f"{place.text(whole)}[{first} : {stop}]")
        case _:
            return


def pairs_dealt_in_turn(node: ast.Call, place: Place) -> Iterator[Change]:
    """The halves of a batch were taken for its even and odd rows."""
    match node, place.parent(node):
        case (
            ast.Call(
                func=ast.Attribute(value=whole, attr="chunk"), args=[ast.Constant(value=int(n))]
            ),
            ast.Assign(targets=[ast.Tuple(elts=names)]),
        ) if len(names) == n:
            text = place.closed(whole)
            parts = ", ".join(f"{text}[{index}::{n}]" for index in range(n))
            yield place.replaced(node, parts)
        case _:
            return
