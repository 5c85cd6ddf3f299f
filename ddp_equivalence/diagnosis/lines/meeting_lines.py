"""The two lines of one function that led to two calls, where their order is the fault."""

from __future__ import annotations

from dataclasses import replace

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import Call, CodeLine


def meeting_lines(first: Call, second: Call) -> tuple[CodeLine, CodeLine] | None:
    """The lines of the innermost function that made both calls, itself or by other functions.

    None if it made both with one line, or if the ways to the calls are not known.
    """
    for here in _way(first):
        for there in _way(second):
            if (here.file, here.function) == (there.file, there.function):
                return None if here.number == there.number else (here, there)
    return None


def at_meeting(
    first: PointedLine | None, second: PointedLine | None, one: Call, other: Call
) -> list[PointedLine]:
    """Two lines of helpers, after the lines of their common caller, which get their marks.

    ``one`` and ``other``: the calls that the lines made, in this order. Only the two lines, if they
    stand in one function already, or if the ways to the calls are not known.
    """
    both = [line for line in (first, second) if line is not None]
    met = meeting_lines(one, other)
    if met is None or first is None or second is None:
        return both
    shown = []
    for line, pointed in zip(met, both, strict=True):
        inside = line.number != pointed.line.number or line.file != pointed.line.file
        where = f", in line {pointed.line.number}" if inside else ""
        note = f"{pointed.note}{where}" if pointed.note else where.removeprefix(", ")
        shown.append(replace(pointed, line=line, note=note))
    known = {(line.file, line.number) for line in met}
    faults_first = sorted(both, key=lambda pointed: not pointed.is_fault)
    rest = [
        replace(pointed, is_fault=False, missing="")
        for pointed in faults_first
        if (pointed.line.file, pointed.line.number) not in known
    ]
    return [*shown, *rest[:1]]


def _way(call: Call) -> tuple[CodeLine, ...]:
    line = call.users_line or call.line
    return () if line is None else (line, *call.callers)
