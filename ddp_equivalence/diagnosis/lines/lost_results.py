"""Collectives that write their result to a temporary tensor, which nothing can use afterwards."""

from __future__ import annotations

import ast

from ddp_equivalence.diagnosis.lines.source_tree import Place as SourcePlace
from ddp_equivalence.diagnosis.lines.source_tree import called_name, place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Contents, Kind

CONSTANTS = frozenset({"zeros", "ones", "empty", "full", "tensor", "new_zeros", "new_ones"})
"""A tensor that is made for a collective alone makes the ranks wait for each other."""


OF_GRADIENTS = frozenset({Contents.COPIES_OF_GRADIENTS, Contents.COPIES_OF_PARAMETERS})


def lines_of_lost_results(view: View, only_gradients: bool = False) -> list[PointedLine]:
    """The first line whose collective changed nothing but a tensor that was gone afterwards.

    ``only_gradients``: the tensor must have been a copy of gradients or parameters.
    """
    places = view.observed.calls.places(
        Kind.COLLECTIVE,
        where=lambda call: (
            call.collective is not None
            and call.collective.result_is_gone
            and (not only_gradients or call.collective.contents in OF_GRADIENTS)
        ),
    )
    return [
        place.pointed(f"changes {_what(view, place)}, which nothing uses afterwards", is_fault=True)
        for place in places
        if _passes_a_temporary(place)
    ][:1]


def _what(view: View, place: Place) -> str:
    """How often the line changed a temporary tensor, where that was not always so."""
    rank = place.ranks[0]
    calls = [
        call
        for call in view.observed.calls.of(rank)
        if call.kind is Kind.COLLECTIVE and (call.users_line or call.line) == place.line
    ]
    if len(place.calls) == len(calls) == 1:
        return "a temporary tensor"
    return f"a temporary tensor in {len(place.calls)} of {len(calls)} calls"


def _passes_a_temporary(place: Place) -> bool:
    """True if the line is nothing but a call, and what it is given has no name."""
    where = place_of(place.line.file, place.line.number)
    collective = place.first.collective
    if where is None or collective is None or not isinstance(where.statement, ast.Expr):
        return False
    call = where.statement.value
    if not isinstance(call, ast.Call) or called_name(call) != collective.op:
        return False
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "tensor")][:1]
    return any(
        isinstance(one, (ast.Call, ast.BinOp, ast.UnaryOp))
        and not (isinstance(one, ast.Call) and called_name(one) in CONSTANTS)
        for one in given
    )


def lines_never_read(view: View) -> list[PointedLine]:
    """The first line that receives or reduces a tensor which no other line of its function reads.

    The tensor must be a variable that the function has made anew, so that no other name has it.
    """
    places = view.observed.calls.places(
        Kind.COLLECTIVE, Kind.POINT_TO_POINT, where=lambda call: call.backwards > 0
    )
    for place in places:
        where = place_of(place.line.file, place.line.number)
        if where is None or where.function is None:
            continue
        op = place.first.collective.op if place.first.collective else place.first.what
        if op not in WRITING:
            continue
        for name in _given(where.statement, op):
            if _is_made_here(where.function, name) and not _is_read(where, name):
                note = f"writes {name}, which no other line reads"
                return [place.pointed(note, is_fault=True)]
    return []


WRITING = frozenset({"recv", "irecv", "all_reduce", "broadcast", "reduce"})
MAKING = ("empty", "zeros", "ones", "full", "new_", "clone", "cat", "stack")


def _given(statement: ast.stmt, op: str) -> list[str]:
    """The variable that a collective of this name is given first."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and called_name(node) == op and node.args:
            first = node.args[0]
            return [first.id] if isinstance(first, ast.Name) else []
    return []


def _is_made_here(function: ast.AST, name: str) -> bool:
    """True if every line that sets the variable makes a new tensor."""
    values = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id == name
    ]
    stores = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
    ]
    return (
        bool(values)
        and len(values) == len(stores)
        and all(isinstance(one, ast.Call) and called_name(one).startswith(MAKING) for one in values)
    )


def _is_read(where: SourcePlace, name: str) -> bool:
    """True if another statement of the function reads the variable."""
    assert where.function is not None
    own = set(map(id, ast.walk(where.statement)))
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and id(node) not in own
        for node in ast.walk(where.function)
    )
