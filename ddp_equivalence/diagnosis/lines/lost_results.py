"""Collectives that write their result to a temporary tensor, which nothing can use afterwards."""

from __future__ import annotations

import ast

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
