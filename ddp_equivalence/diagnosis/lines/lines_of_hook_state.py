"""The lines that made the numbers by which a communication hook decides what it reduces."""

from __future__ import annotations

from ddp_equivalence.diagnosis.lines.given_to import (
    given_to_class,
    lines_that_made,
    set_as_attribute,
)
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place, StepCalls
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine, Kind

MOST_NUMBERS = 2


def hooks_of_all_steps(view: View) -> list[Place]:
    """The lines that gave DDP a communication hook, in this step or before."""
    of_all = StepCalls({rank: seen.calls for rank, seen in view.observed.by_rank.items()})
    return of_all.places(Kind.HOOK)


def lines_of_hook_state(view: View) -> list[PointedLine]:
    """The line that gave DDP the last hook, with what the hook asks its state for, behind those
    that made these numbers, at most three in all; [] if the step made none of them.
    """
    for place in hooks_of_all_steps(view)[-1:]:
        call, run = place.first, run_lines(view, place.ranks[0])
        state = call.hook_state
        if state is None:
            return []
        made: dict[CodeLine, PointedLine] = {}
        held = []
        for name, value in call.numbers:
            bounds = [*given_to_class(run, state.kind, state.arguments, name)]
            for bound in (bounds or set_as_attribute(run, name)) if name in state.asked else ():
                held.append(f"{name}={value:g}")
                note = f"made {name}={value:g}, which {call.what} asks"
                lines = lines_that_made(run, bound) or [bound[0].line(bound[1])]
                for number, line in enumerate(lines):
                    made.setdefault(line, PointedLine(line, "" if number else note, not number))
        if not made:
            return []
        note = f"{call.what} gets {', '.join(dict.fromkeys(held[:MOST_NUMBERS]))}"
        return [*list(made.values())[:2], place.pointed(note)]
    return []
