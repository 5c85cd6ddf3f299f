"""What a call did to gradients, in words, and as a line to point at."""

from __future__ import annotations

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.gradient_path import Path, Station, line_of
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import ranked
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind
from ddp_equivalence.measurement.gradient_watch import SAME_FACTOR
from ddp_equivalence.measurement.trace import ModuleCall


def done_text(call: Call, pieces: Pieces) -> str:
    """What a call did to gradients, as a clause without an object: ``they are ...``."""
    if call.kind is Kind.BACKWARD:
        return "a backward pass ran"
    if call.collective is not None:
        operation = f" with {call.collective.reduce_op}" if call.collective.reduce_op else ""
        return f"{call.collective.op}{operation} over {_group(call, pieces)}"
    change = call.change
    if change is None:
        return f"{call.kind.value} changed them"
    if change.cleared:
        return "they were cleared"
    if change.factor is not None and abs(change.factor - 1) <= SAME_FACTOR:
        return "they were changed, by little"
    if change.factor is not None:
        return f"they were multiplied by {text_of(change.factor, '.6g')}"
    return "they were changed, and not by a factor"


def _group(call: Call, pieces: Pieces) -> str:
    assert call.collective is not None
    if len(call.collective.ranks) == pieces.view.world_size:
        return "all ranks"
    return ranked(call.collective.ranks, pieces.view.world_size)


def pointed(station: Station, note: str, is_fault: bool = False) -> PointedLine | None:
    """The line of a station; None if it is not known."""
    return at(line_of(station.call), note, is_fault)


def at(
    line: CodeLine | None, note: str, is_fault: bool = False, missing: str = ""
) -> PointedLine | None:
    """The line, if it is known."""
    return None if line is None else PointedLine(line, note, is_fault, missing)


def hooks(pieces: Pieces, path: Path, station: Station | None) -> list[PointedLine]:
    """The last line that registered a hook on these gradients, if the station is a backward."""
    if station is None or station.call.kind is not Kind.BACKWARD:
        return []
    places = pieces.view.observed.calls.places(
        Kind.HOOK,
        Kind.TENSOR_HOOK,
        where=lambda call: not call.names or bool(set(call.names) & set(path.names)),
    )
    inside = pieces.view.observed.calls.places(
        Kind.COLLECTIVE,
        where=lambda call: call.in_backward and call.backwards == station.call.backwards + 1,
    )
    lines = [
        at(place.first.made_at or place.line, f"{place.first.what}: it ran in backward", True)
        for place in places[-1:]
    ]
    changes = pieces.view.observed.calls.changes(
        lambda call: (
            call.in_backward
            and call.change is not None
            and call.change.factor is not None
            and call.backwards == station.call.backwards + 1
            and bool(set(call.change.names) & set(path.names))
        )
    )
    lines += [
        at(place.line, f"{done_text(place.first, pieces)} in this hook", True)
        for place in changes[-1:]
        if place.line not in {line_of(station.call), *(one.line for one in lines if one)}
    ]
    lines += [place.pointed("a collective of this hook") for place in inside[-1:]]
    return [one for one in lines if one is not None]


def module_text(call: ModuleCall | None) -> str:
    """A module and its class, as text."""
    if call is None:
        return "the model"
    return f"{call.name} ({call.kind})" if call.name else f"the model ({call.kind})"
