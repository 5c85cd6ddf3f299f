"""The lines of a backward method that decided for which inputs it gives a gradient back."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddp_equivalence.diagnosis.lines.source_tree import Place, place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.cuts import OwnBackward
from ddp_equivalence.measurement.observation import Observation

ASKED = "needs_input_grad"
"""The attribute of a context that says which inputs need a gradient."""


def lines_that_ask(seen: Observation, own: OwnBackward) -> list[PointedLine]:
    """The line of a method that ran and asked whether an input needs a gradient that it withheld.

    [] if there is none, or if the method says itself that it returns None for this input.
    """
    place = place_of(own.line.file, own.line.number)
    if not own.withheld or place is None or place.function is None:
        return []
    returned = [_returned(place, number) for number in own.withheld]
    if any(isinstance(one, ast.Constant) for one in returned):
        return []
    asking = [
        (line, there.statement)
        for line in seen.trace.times_run or ()
        if line.file == own.line.file
        and (there := place_of(line.file, line.number)) is not None
        and there.function is place.function
        and _asks(there, line)
    ]
    names = {one.id for one in returned if isinstance(one, ast.Name)}
    setting = [(line, one) for line, one in asking if names & _set_in(one)]
    note = f"asks {ASKED} of {own.name}: which inputs need a gradient"
    return [PointedLine(line, note, is_fault=True) for line, _ in (setting or asking)[:1]]


def _returned(place: Place, number: int) -> ast.expr | None:
    """What the return statement gives for the input of this number; None if it is not written."""
    value = place.statement.value if isinstance(place.statement, ast.Return) else None
    parts: Sequence[ast.expr] = value.elts if isinstance(value, ast.Tuple) else []
    if not isinstance(value, ast.Tuple):
        return value if number == 0 else None
    if any(isinstance(one, ast.Starred) for one in parts[: number + 1]) or number >= len(parts):
        return None
    return parts[number]


def _asks(place: Place, line: CodeLine) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == ASKED and node.lineno == line.number
        for node in ast.walk(place.statement)
    )


def _set_in(statement: ast.stmt) -> set[str]:
    """The variables that get a value in a statement."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
