"""The lines that made the numbers by which a communication hook decides what it reduces."""

from __future__ import annotations

from ddp_equivalence.diagnosis.lines.given_to import (
    given_to_class,
    lines_that_made,
    set_in_class,
    sole_origin,
)
from ddp_equivalence.diagnosis.lines.run_lines import RunLines, run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place, StepCalls
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

MOST_NUMBERS = 2
MOST_LINES = 3


def hooks_of_all_steps(view: View) -> list[Place]:
    """The lines that gave DDP a communication hook, in this step or before."""
    of_all = StepCalls({rank: seen.calls for rank, seen in view.observed.by_rank.items()})
    return of_all.places(Kind.HOOK)


def lines_of_hook_state(view: View) -> list[PointedLine]:
    """The lines that made the numbers which conditions of the last hook ask, and the line that gave
    DDP this hook; at most three, and [] if the step made no such number.
    """
    for place in hooks_of_all_steps(view)[-1:]:
        call, run = place.first, run_lines(view, place.ranks[0])
        made: list[PointedLine] = []
        held: list[str] = []
        for name, value in call.numbers:
            lines = _lines_of_number(run, call, name, f"{name}={value:g}")
            if lines:
                held.append(f"{name}={value:g}")
                made += lines
        if made:
            gets = place.pointed(f"{call.what} gets {' and '.join(held[:MOST_NUMBERS])}")
            others = [one for one in distinct_lines(made) if one.line != place.line]
            return [*others[: MOST_LINES - 1], gets]
    return []


def _lines_of_number(run: RunLines, call: Call, name: str, shown: str) -> list[PointedLine]:
    """The lines that made what the state of a hook holds under this name."""
    state = call.hook_state
    if state is None or name not in state.asked:
        return []
    given = [*given_to_class(run, state.kind, state.arguments, name)]
    given = given or set_in_class(run, state.kind, name)
    if len(given) != 1:
        return []
    origin = sole_origin(run, given[0])
    lines = lines_that_made(run, given[0])
    if origin is None:
        return [PointedLine(line, "", True) for line in lines[:1]]
    at = origin[0].line(origin[1])
    note = f"gives {shown}, which {call.what} asks"
    return [PointedLine(at, note, True), *(PointedLine(one) for one in lines if one != at)]


def distinct_lines(pointed: list[PointedLine]) -> list[PointedLine]:
    """Each line once, those that are at fault first."""
    ordered = sorted(pointed, key=lambda one: not one.is_fault)
    return list({one.line: one for one in reversed(ordered)}.values())[::-1]
