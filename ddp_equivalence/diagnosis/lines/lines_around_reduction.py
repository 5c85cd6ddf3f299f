"""The lines around a reduction that decided what it reduces, how often it runs, and for whom."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddp_equivalence.diagnosis.lines.attributes import line_of_compared, lines_that_set_attribute
from ddp_equivalence.diagnosis.lines.decisions import Decision, conditions, decisions
from ddp_equivalence.diagnosis.lines.divided_by import divisors, divisors_in_function
from ddp_equivalence.diagnosis.lines.origins import (
    chosen,
    gone_through,
    links_of,
    links_of_line,
)
from ddp_equivalence.diagnosis.lines.run_lines import RunLines, run_lines
from ddp_equivalence.diagnosis.lines.source_tree import loops_around, place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind


def way_to(view: View, call: Call) -> tuple[CodeLine, ...]:
    """The line that made a call and those that led to it, the innermost first, up to the function
    that called backward; of a call in a hook, only those of the hook.
    """
    line = call.users_line or call.line
    if line is None:
        return ()
    backward = {one.line for one in view.observed.calls.places(Kind.BACKWARD)}
    functions = {(one.file, one.function) for one in backward}
    way: list[CodeLine] = []
    for one in (line, *call.callers):
        if one in backward:
            break
        way.append(one)
        if (one.file, one.function) in functions:
            break
    return tuple(way)


def lines_that_left_out(view: View, place: Place) -> list[PointedLine]:
    """The line that kept some gradients from being reduced at this place; [] if none was seen.

    The first of these that was seen: a line that left the loop, a condition that was not always the
    same, a line that skipped the rest of a pass, and the line that made what the loop goes through.
    """
    run = run_lines(view, place.ranks[0])
    way = way_to(view, place.first)
    decided = decisions(run, way)
    for kind in ("left", "condition", "skipped"):
        for one in decided:
            if one.what == kind:
                return [*line_of_compared(run, one.test, one.line), one.pointed()]
    link = chosen(gone_through(run, way))
    if link is not None:
        note = f"makes {link.name}, which the loop goes through"
        note = note if link.name else "chooses what the loop goes through"
        return [PointedLine(link.line, note, True)] if link.line != place.line else []
    return _lines_that_made(run, place, way[1:])


def _lines_that_made(run: RunLines, place: Place, callers: Sequence[CodeLine]) -> list[PointedLine]:
    """The line that made the tensor which a collective was given, or what it was made of."""
    made_at = place.first.made_at
    if made_at is None or made_at == place.line:
        return []
    link = chosen(links_of_line(run, made_at, callers))
    if link is None or link.line == made_at or link.line == place.line:
        note = f"makes the tensor that line {place.line.number} is given"
        return [PointedLine(made_at, note, True)]
    return [
        PointedLine(link.line, f"gives {link.name}, of which line {made_at.number} is made", True)
    ]


def lines_of_no_sync(view: View) -> list[PointedLine]:
    """The line that decided that ``no_sync`` is entered, or else the line that enters it."""
    for place in view.observed.calls.places(Kind.NO_SYNC)[-1:]:
        run = run_lines(view, place.ranks[0])
        decision = _condition_of(run, place.line)
        if decision is not None:
            return [
                decision.pointed(),
                place.pointed("no synchronisation inside"),
            ]
        made = _context_made(run, place.line)
        return [
            *(PointedLine(one, "chooses whether DDP synchronises", True) for one in made),
            place.pointed("no synchronisation inside", is_fault=not made),
        ]
    return []


def _condition_of(run: RunLines, line: CodeLine) -> Decision | None:
    place = place_of(line.file, line.number)
    return next(conditions(run, place), None) if place is not None else None


def _context_made(run: RunLines, line: CodeLine) -> Sequence[CodeLine]:
    """The line that chose the context which a ``with`` enters by name."""
    place = place_of(line.file, line.number)
    if place is None or not isinstance(place.statement, (ast.With, ast.AsyncWith)):
        return ()
    for item in place.statement.items:
        expression = item.context_expr
        if isinstance(expression, ast.Call) and not expression.args:
            expression = expression.func
        if isinstance(expression, ast.Name):
            return [one.line for one in links_of(run, place, expression)][:1]
    return ()


def lines_of_divisor(view: View, rank: int, line: CodeLine) -> list[PointedLine]:
    """The line that made the number by which a line divides or multiplies; [] if it is not one."""
    return [
        PointedLine(link.line, f"sets {link.name}, the number at line {line.number}")
        for link in divisors(run_lines(view, rank), line)[-1:]
        if link.line != line
    ]


def lines_of_hook_number(view: View, number: float, meaning: str) -> list[PointedLine]:
    """The line that gave the state of a communication hook the number that its hook divides by.

    ``meaning``: what the number is.
    """
    for place in view.observed.calls.places(Kind.HOOK)[-1:]:
        begins = place.first.made_at
        run = run_lines(view, place.ranks[0])
        held = [name for name, value in place.first.numbers if value == number]
        named = divisors_in_function(begins) if begins is not None else ()
        for name in held:
            if name in named:
                return [
                    PointedLine(
                        links_of_line(run, at)[-1].line, f"{name} is {number:g}, {meaning}", True
                    )
                    for at in lines_that_set_attribute(run, name)
                ]
    return []


def lines_of_hook_divisors(view: View, hook: Place) -> list[PointedLine]:
    """The lines that set what a communication hook multiplies or divides by."""
    begins = hook.first.made_at
    run = run_lines(view, hook.ranks[0])
    return [
        PointedLine(line, f"sets {name}, by which {begins.function} multiplies or divides")
        for name in (divisors_in_function(begins) if begins is not None else ())
        for line in lines_that_set_attribute(run, name)
        if begins is not None
    ]


def lines_of_exchange(view: View, rank: int, only_if_few: bool = False) -> list[PointedLine]:
    """The innermost loop in which a rank receives tensors point to point, and how many it gets.

    Without a loop, the line that receives. ``only_if_few``: only if it receives fewer tensors than
    there are other ranks.
    """
    calls = [
        call
        for call in view.observed.calls.of(rank)
        if call.kind is Kind.POINT_TO_POINT
        and call.what in ("recv", "irecv")
        and call.backwards > 0
    ]
    if not calls:
        return []
    if len(calls) >= view.world_size - 1 and only_if_few:
        return []
    calls = [one for one in calls if (one.line, one.callers) == (calls[0].line, calls[0].callers)]
    times = "once" if len(calls) == 1 else f"{len(calls)} times"
    others = view.world_size - 1
    note = f"rank {rank} receives {times}; there {'is' if others == 1 else 'are'} {others} other"
    note += " rank" if others == 1 else " ranks"
    way = way_to(view, calls[0])
    for line in way:
        place = place_of(line.file, line.number)
        for loop in loops_around(place) if place is not None else ():
            assert place is not None
            return [PointedLine(place.line(loop), f"in this loop {note}", True)]
    return [PointedLine(line, note, True) for line in way[:1]]
